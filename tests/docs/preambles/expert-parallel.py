"""What docs/parallelism/expert-parallel.md takes for granted: batches and a loss."""

from types import SimpleNamespace

import numpy as np

from parallel import nn

RANKS = 4

x, y = np.ones((4, 8), np.float32), np.zeros(4, np.int64)
batches = [SimpleNamespace(x=x, y=y)] * 2
loss = nn.CrossEntropyLoss()
