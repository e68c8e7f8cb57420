"""Functions that wait for each other in a circle are told, with a table."""

import threading

import pytest

from meshlib import rpc
from tests.support.meshlib.rpc_workers import workers

there = threading.Event()
mine = []


@pytest.fixture(autouse=True)
def _nothing_yet():
    there.clear()
    yield
    mine.clear()


def wait_for_itself():
    """Make an object out of that very object."""
    assert there.wait(90)
    return mine[0].to_here(timeout=0)


def fetch(rref):
    return rref.to_here(timeout=0)


def make_through(to):
    """Make an object out of what another worker has, which asks for this very object."""
    assert there.wait(90)
    return rpc.rpc_sync(to, fetch, (mine[0],), timeout=0)


def test_an_object_that_waits_for_itself():
    def program():
        mine.append(rpc.remote(0, wait_for_itself, timeout=0))
        there.set()
        with pytest.raises(rpc.WaitCycleError, match="wait for each other forever") as caught:
            mine[0].to_here(timeout=0)
        assert "worker 'w0' (rank 0): " in str(caught.value)
        assert "wait_for_itself waits for an object that is being made, for" in str(caught.value)
        mine.clear()

    workers(1, program)


def test_a_circle_through_another_worker():
    def program():
        mine.append(rpc.remote(0, make_through, (1,), timeout=0))
        there.set()
        with pytest.raises(rpc.WaitCycleError) as caught:
            mine[0].to_here(timeout=0)
        rows = str(caught.value).splitlines()[1:]
        assert len(rows) == 3
        assert {row.split("(")[0].strip() for row in rows} == {"worker 'w0'", "worker 'w1'"}
        mine.clear()

    workers(2, program)
