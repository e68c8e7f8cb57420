"""Setting the machine's clock changes nothing: every wait goes by the steady one."""

import random
import threading
import time

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks


@pytest.fixture
def mad_clock(monkeypatch):
    """The wall clock jumps by years, forth and back, each time that somebody looks."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + random.uniform(-1e9, 1e9))
    monkeypatch.setattr(time, "time_ns", lambda: int(time.time() * 1e9))


def call_in_vain():
    dist.barrier(timeout=0.5)
    dist.barrier()  # who comes late may find its own part of the first done


@pytest.mark.parametrize("backend", ["inproc", "shm", "tcp"])
def test_calls_end_and_time_out_as_ever(mad_clock, backend):
    over, both = threading.Event(), threading.Barrier(2, timeout=60)

    def program():
        for _ in range(20):
            dist.all_reduce(np.ones(3))
            dist.barrier()
        rank = dist.get_rank()
        if rank == 0:
            dist.send(np.ones(2), 1)
        elif rank == 1:
            dist.recv(np.empty(2), 0)
        if rank == 2:
            assert over.wait(60)
        else:
            both.wait()  # who has not received yet cannot once the other has given up
        began = time.monotonic()
        with pytest.raises(dist.CollectiveTimeoutError, match=r"([01], )*2 ha(s|ve) not arrived"):
            call_in_vain()
        over.set()
        return time.monotonic() - began

    assert max(run_ranks(program, 3, backend=backend)[:2]) >= 0.4
