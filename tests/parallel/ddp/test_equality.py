"""Fifty steps on several ranks and on one process: all that may be combined, in both precisions.

More about uneven inputs is in ``test_join.py``.
"""

from contextlib import nullcontext

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel import DistributedDataParallel, nn, optim
from tests.support.parallel.training import assert_close, batch, parameters

STEPS = 50
UNEVEN = (35, 50)  # steps of the two ranks
WORLD = 2
TINY = 0.0005  # MiB: several buckets
TOLERANCE = {"f8": 1e-12, "f4": 1e-5}


class Heads(nn.Module):
    """A body and two heads; the output is the sum of those in use."""

    def __init__(self, dtype):
        super().__init__()
        rng = np.random.default_rng(0)
        self.body = nn.Sequential(nn.Linear(6, 16, rng=rng, dtype=dtype), nn.Tanh())
        self.left = nn.Linear(16, 4, rng=rng, dtype=dtype)
        self.right = nn.Linear(16, 4, rng=rng, dtype=dtype)
        self.used = ("left", "right")

    def forward(self, x):
        heads = [getattr(self, name) for name in self.used]
        self.save_for_backward(heads)
        features = self.body(x)
        return sum(head(features) for head in heads)

    def backward(self, grad):
        return self.body.backward(sum(head.backward(grad) for head in reversed(self.saved())))


def head_of(rank, step):
    """In every fourth step all use the left head; in the others each rank has one of its own."""
    return ("left",) if step % 4 == 0 or (step + rank) % 2 == 0 else ("right",)


def train(model, heads, ranks, micro, dtype, unused, counts):
    """Train on the shares of ``ranks``, one after the other, each in ``micro`` pieces.

    A rank has inputs for as many steps as ``counts`` says.
    """
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    for step in range(max(counts[rank] for rank in ranks)):
        optimizer.zero_grad()
        pieces = [(rank, i) for rank in ranks if step < counts[rank] for i in range(micro)]
        for rank, i in pieces:
            x, y = (part[rank::WORLD] for part in batch(step, dtype))
            if unused:
                heads.used = head_of(rank, step)
            last = (rank, i) == pieces[-1] or model is heads
            with nullcontext() if last else model.no_sync():
                loss(model(x[i::micro]), y[i::micro])
                model.backward(loss.backward(1 / len(pieces)))
        optimizer.step()


def scaled_sum(group, bucket):
    """Average in another way than the wrapper's own."""
    work = group.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value() / group.size())


@pytest.mark.parametrize("counts", [(STEPS, STEPS), UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("hook", [None, scaled_sum], ids=["plain", "hook"])
@pytest.mark.parametrize("unused", [False, True], ids=["used", "unused"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_ranks_equal_one_process(dtype, micro, unused, hook, counts):
    def job():
        heads = Heads(dtype)
        model = DistributedDataParallel(heads, bucket_cap_mb=TINY, find_unused_parameters=unused)
        if hook is not None:
            model.register_comm_hook(model.process_group, hook)
        with nullcontext() if counts != UNEVEN else model.join(divide_by_initial_world_size=False):
            train(model, heads, [dist.get_rank()], micro, dtype, unused, counts)
        return parameters(model)

    results = run_ranks(job, WORLD)
    heads = Heads(dtype)
    train(heads, heads, range(WORLD), micro, dtype, unused, counts)
    assert_close(results, parameters(heads), TOLERANCE[dtype])
    for path, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][path])
