"""The compiled program and its calls of Python: all that depends on XLA and on JAX's internals."""
