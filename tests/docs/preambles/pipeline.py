"""Assumed by docs/parallelism/pipeline.md: batches, and a mesh with a dim for data."""

import jax  # noqa: F401 (so that ranks have traces of their own)
import numpy as np

RANKS = 2

_rng = np.random.default_rng(1)
batches = [(_rng.normal(size=(8, 64)).astype("f4"), _rng.integers(0, 10, 8)) for _ in range(2)]
