"""Assumed by docs/train/samplers.md: a reader's dataset."""

import numpy as np


class Samples:
    """A dataset, as loaders want it."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return np.full(8, index, np.float32)


dataset = source = Samples()
batch_size = 4
