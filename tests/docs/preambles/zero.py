"""Assumed by docs/parallelism/zero.md: a reader's model."""

import numpy as np

from parallel import nn


def make_model():
    rng = np.random.default_rng(1)
    return nn.Sequential(nn.Linear(8, 8, rng=rng), nn.ReLU(), nn.Linear(8, 2, rng=rng))
