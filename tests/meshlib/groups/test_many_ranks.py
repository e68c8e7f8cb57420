"""Hundreds of ranks as threads: what each of them does must not be done for each pair of them.

The deadlines are far more than these take, and far less than anything that every rank does for
every other one, at every look, took.
"""

import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks

MANY = 300


def test_they_meet_reduce_and_leave():
    def program():
        dist.barrier()
        return dist.all_reduce(np.ones(1000))[-1]

    assert run_ranks(program, MANY, timeout=120) == [MANY] * MANY


def test_they_have_two_threads_beside_them_in_all():
    def program():
        dist.barrier()
        count = len(set(threading.enumerate()) - before)
        dist.barrier()
        return count

    before = set(threading.enumerate())
    # One follows the events, one looks for stalls.
    assert run_ranks(program, 16) == [16 + 2] * 16


def test_one_that_raises_ends_the_others():
    def program():
        if dist.get_rank() == 3:
            raise OSError("no such thing")
        dist.barrier()

    with pytest.raises(RankError, match=f"rank 3 of {MANY} raised OSError"):
        run_ranks(program, MANY, timeout=120)


def test_one_that_goes_is_missed_by_name():
    def program():
        if dist.get_rank() != 3:
            dist.barrier()

    with pytest.raises(RankError, match="rank 3 has left the job without a call"):
        run_ranks(program, MANY, timeout=120)


def test_one_in_another_call_is_found_among_them():
    def program():
        a, b = dist.new_group(), dist.new_group()
        dist.barrier(group=b if dist.get_rank() == 3 else a)

    with pytest.raises(RankError, match="wait for each other in different calls"):
        run_ranks(program, 150, timeout=120)
