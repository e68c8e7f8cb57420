"""What docs/parallelism/context-parallel.md takes for granted: JAX, before the ranks begin."""

import jax  # noqa: F401 (so that ranks have traces of their own)
