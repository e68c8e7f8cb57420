"""Assumed by docs/program/sharding.md: a batch, a weight, a global array."""

import numpy as np

batch, weight = np.ones((8, 6)), np.ones((6, 4))
array = np.zeros((8, 3, 5))
shape, rank = array.shape, 3
