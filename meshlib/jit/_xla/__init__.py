"""Compiled programs and their calls: all code that depends on XLA and on JAX's internals."""
