"""``isend`` of what has room at the receiver: done when it returns, and no thread needed."""

import threading

import numpy as np

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from transport._calls.header import Kind
from transport._shm import ShmCommunicator

SMALL, LARGE = 1 << 14, 1 << 20  # elements of 8 bytes; of the latter there is no room for all
SECONDS = 60


def test_what_has_room_is_there_at_once_and_what_has_not_does_not_wait():
    may_receive = threading.Event()

    def rank():
        small, large = np.arange(SMALL) * 1.0, np.arange(LARGE) * 1.0
        first = np.zeros(1)  # leaves room for the next also where nobody has taken it yet
        if dist.get_rank() == 0:
            dist.send(first, 1)  # from then on it is known where the receiver's ring is
            works = [dist.isend(x, 1) for x in (small + 1, large + 2, small + 3)]
            done = [work.is_completed() for work in works]
            may_receive.set()
            assert all(work.wait() for work in works)
            return done
        dist.recv(first, 0)
        assert may_receive.wait(SECONDS)
        for i, x in enumerate((small, large, small), 1):
            dist.recv(x, 0)
            assert x[0] == i
            assert x[-1] == i + len(x) - 1
        return None

    # Nothing overtakes what waits.
    assert run_ranks(rank, 2, backend="shm", timeout=2 * SECONDS)[0] == [True, False, False]


def test_a_full_ring_keeps_nobody():
    """15 MB, of which nothing is received before all of it was handed over."""
    may_receive, count = threading.Event(), 60

    def rank():
        x = np.zeros(SMALL)
        if dist.get_rank() == 0:
            dist.send(x, 1)
            works = [dist.isend(x + i, 1) for i in range(count)]
            may_receive.set()
            return [work.wait() for work in works]
        dist.recv(x, 0)
        assert may_receive.wait(SECONDS)
        for i in range(count):
            dist.recv(x, 0)
            assert x[0] == x[-1] == i
        return None

    assert run_ranks(rank, 2, backend="shm", timeout=2 * SECONDS)[0] == [True] * count


def test_room_is_looked_for_when_the_turn_has_come(monkeypatch):
    """Before, another send of this rank could take it."""
    looked, has_room = [], ShmCommunicator.takes_at_once

    def look(comm, dst, nbytes):
        stream = call_queue_of(dist.group.WORLD).streams.of_peer(Kind.SEND, dst, 0)
        looked.append(stream.is_idle())
        return has_room(comm, dst, nbytes)

    monkeypatch.setattr(ShmCommunicator, "takes_at_once", look)

    def rank():
        x = np.zeros(10)
        if dist.get_rank() == 0:
            dist.send(x, 1)
            return [dist.isend(x, 1).wait(SECONDS) for _ in range(3)]
        return [dist.recv(x, 0) for _ in range(4)]

    assert run_ranks(rank, 2, backend="shm", timeout=2 * SECONDS)[0] == [True] * 3
    assert looked == [False] * 3


def test_to_who_has_left_it_fails_when_it_is_waited_for():
    def rank():
        x = np.zeros(10)
        if dist.get_rank() == 1:
            dist.recv(x, 0)
            dist.destroy_process_group()
            return None
        dist.send(x, 1)
        error = None
        while error is None:  # until it is known here
            work = dist.isend(x, 1)
            try:
                work.wait(SECONDS)
            except dist.DistError as raised:
                error = raised
        return str(error)

    assert "rank 1" in run_ranks(rank, 2, backend="shm", timeout=2 * SECONDS)[0]
