"""One small training job, for the tests that compare several ranks with one process."""

from contextlib import nullcontext

import numpy as np

from parallel import DistributedDataParallel, nn, optim

BATCH = 12


def make_model(seed=0, dtype="f8"):
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Linear(6, 16, rng=rng, dtype=dtype),
        nn.Tanh(),
        nn.LayerNorm(16, dtype=dtype),
        nn.Linear(16, 16, rng=rng, dtype=dtype),
        nn.GELU(),
        nn.Linear(16, 4, rng=rng, dtype=dtype),
    )


def batch(step, dtype="f8"):
    rng = np.random.default_rng(1000 + step)
    return rng.normal(size=(BATCH, 6)).astype(dtype), rng.integers(0, 4, BATCH)


def share(rank, step, micro=0, dtype="f8"):
    """Return what is a rank's own of a step: inputs and targets."""
    rng = np.random.default_rng([rank, step, micro])
    return rng.normal(size=(4, 6)).astype(dtype), rng.integers(0, 4, 4)


def train(model, rank=0, world=1, steps=50, micro=1, dtype="f8"):
    """Train ``model``; each step uses this rank's part of the batch, in ``micro`` pieces."""
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()
    for step in range(steps):
        x, y = (part[rank::world] for part in batch(step, dtype))
        optimizer.zero_grad()
        for i in range(micro):
            last = i == micro - 1 or not isinstance(model, DistributedDataParallel)
            with nullcontext() if last else model.no_sync():
                loss(model(x[i::micro]), y[i::micro])
                model.backward(loss.backward(1 / micro))
        optimizer.step()
    return model


def parameters(model):
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {path: p.data.copy() for path, p in inner.named_parameters()}


def assert_close(models, expected, tolerance):
    for got in models:
        for path, value in expected.items():
            np.testing.assert_allclose(got[path], value, rtol=0, atol=tolerance, err_msg=path)
