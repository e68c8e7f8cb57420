"""Assumed by docs/parallelism/uneven-inputs.md: a model and its training."""

import numpy as np

from parallel import nn, optim


def make_model():
    rng = np.random.default_rng(1)
    return nn.Sequential(nn.Linear(8, 8, rng=rng), nn.ReLU(), nn.Linear(8, 2, rng=rng))


x, y = np.ones((4, 8), np.float32), np.zeros(4, np.int64)
loss = nn.CrossEntropyLoss()
my_inputs = [(x, y)] * 3
optimizer = optim.SGD([nn.Parameter(x)])
