"""Assumed by docs/parallelism/data-parallel.md: a reader's dataset, model and loss."""

from types import SimpleNamespace

import numpy as np

from parallel import nn, optim


class Samples:
    """A dataset, as loaders want it."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return np.full(8, index, np.float32)


def make_model():
    rng = np.random.default_rng(1)
    return nn.Sequential(nn.Linear(8, 8, rng=rng), nn.ReLU(), nn.Linear(8, 2, rng=rng))


dataset = source = Samples()
batch_size = 4
x, y = np.ones((4, 8), np.float32), np.zeros(4, np.int64)
loss = nn.CrossEntropyLoss()
batches = [SimpleNamespace(x=x, y=y)] * 2
my_inputs = [(x, y)] * 3
optimizer = optim.SGD([nn.Parameter(x)])
