"""Assumed by docs/parallelism/fsdp.md: a model, batches and a loss."""

from types import SimpleNamespace

import jax  # noqa: F401 (so that ranks have traces of their own)
import numpy as np

from parallel import nn

RANKS = 4


def make_model():
    rng = np.random.default_rng(0)
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, rng=rng), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(8, 3, rng=rng))
    model.blocks = blocks
    return model


x, y = np.ones((4, 8), np.float32), np.zeros(4, np.int64)
batches = [SimpleNamespace(x=x, y=y)] * 2
loss = nn.CrossEntropyLoss()
