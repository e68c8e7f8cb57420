"""Algorithms of each kind of parallelism on plain arrays, independent of modules and JAX."""
