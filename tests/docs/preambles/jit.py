"""What docs/program/jit.md takes for granted: JAX, before the ranks begin."""

import jax  # noqa: F401
