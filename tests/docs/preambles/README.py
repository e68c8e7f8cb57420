"""What the README takes for granted: a reader's dataset."""

import numpy as np

_rng = np.random.default_rng(1)
images, labels = _rng.random((16, 64), np.float32), _rng.integers(0, 10, 16)
dataset = range(16)


def batches(sampler):
    return np.split(np.array(list(sampler)), 2)
