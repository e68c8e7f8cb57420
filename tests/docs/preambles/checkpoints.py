"""Assumed by docs/train/checkpoints.md: a wrapped model, its optimizer and sampler."""

import numpy as np

from parallel import DistributedDataParallel, DistributedSampler, nn, optim

model = DistributedDataParallel(nn.Linear(3, 2, rng=np.random.default_rng(0)))
optimizer = optim.Adam(model.parameters())
sampler = DistributedSampler(range(16))
