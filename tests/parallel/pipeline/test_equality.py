"""A pipeline trains as one process does: 20 steps, float64, every schedule."""

from functools import cache

import pytest

from meshlib.testing import run_ranks
from parallel.pipeline import get_schedule_class
from tests.support.parallel.pipeline_training import (
    assert_equal,
    ddp,
    fsdp,
    make_mesh,
    tensor_parallel,
    train_pipeline,
    train_whole,
)

LOOPED = {"GPipe": 1, "1F1B": 1, "Eager1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}
SCHEDULES = [*LOOPED, "InterleavedZeroBubble:1", "ZBVZeroBubble", "DualPipeV"]
whole = cache(train_whole)


def placed(name, ranks):
    """Return each rank's stages."""
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    each = 1 if name.endswith(":1") else LOOPED[name]
    return [list(range(rank, ranks * each, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_one_process(name, ranks):
    def job():
        kind = get_schedule_class(name.removesuffix(":1"))
        return train_pipeline(make_mesh(ranks), kind, placed(name, ranks), 8)

    assert_equal(run_ranks(job, ranks), whole())


# The others are made of the same actions, and of the same stages.
WITH_SHARDS = ["1F1B", "InterleavedZeroBubble", "DualPipeV"]


@pytest.mark.parametrize(
    ("name", "wrap"), [(n, ddp) for n in SCHEDULES] + [(n, fsdp) for n in WITH_SHARDS]
)
def test_with_data_parallel_on_another_dim(name, wrap):
    def job():
        kind = get_schedule_class(name.removesuffix(":1"))
        return train_pipeline(make_mesh(2, 2), kind, placed(name, 2), 4, wrap=wrap)

    assert_equal(run_ranks(job, 4), whole())


@pytest.mark.parametrize("dp", [1, 2])
def test_with_tensor_parallel_on_another_dim(dp):
    """With ``dp`` of 2 the parts of each rank are sharded once more."""

    def wrap(module, mesh):
        split = tensor_parallel(module, mesh)
        return split if dp == 1 else fsdp(split, mesh)

    def job():
        kind = get_schedule_class("1F1B")
        return train_pipeline(make_mesh(2, dp, 2), kind, placed("1F1B", 2), 4, wrap=wrap)

    assert_equal(run_ranks(job, 4 * dp), whole())
