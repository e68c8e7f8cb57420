"""The call queue without checks gives the same results, and leaves out what it says."""

import numpy as np
import pytest

import meshlib as dist
from meshlib._groups import process_group
from meshlib._job.current import current_world
from meshlib.testing import run_ranks
from tests.benchmarks.unchecked import UncheckedCallQueue


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_unchecked_calls_are_right_and_leave_no_record(backend, monkeypatch):
    monkeypatch.setattr(process_group, "CallQueue", UncheckedCallQueue)

    def program():
        x = np.full(3, dist.get_rank() + 1.0)
        dist.all_reduce(x)
        with pytest.raises(RuntimeError, match="synchronous collectives"):
            dist.all_reduce(x, async_op=True)
        return x.tolist(), current_world().recorder.records()

    assert run_ranks(program, 2, backend=backend) == [([3.0] * 3, [])] * 2


def test_unchecked_members_of_different_calls_do_not_notice(monkeypatch):
    monkeypatch.setattr(process_group, "CallQueue", UncheckedCallQueue)

    def program():
        x = np.full(2, dist.get_rank() + 2.0)
        dist.all_reduce(x, dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.PRODUCT)
        return x[0]

    assert run_ranks(program, 2) == [6.0, 5.0]
