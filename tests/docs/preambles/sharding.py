"""What docs/sharding.md takes for granted: a batch, a weight, and a global array with its shape."""

import numpy as np

batch, weight = np.ones((8, 6)), np.ones((6, 4))
array = np.zeros((8, 3, 5))
shape, rank = array.shape, 3
