"""What docs/mesh.md takes for granted: arrays to reduce."""

import numpy as np

x, loss = np.ones(3), np.ones(1)
