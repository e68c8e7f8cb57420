"""Connections of a group that are made side by side."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._errors import CommunicatorAbortedError, PeerLostError
from transport._operands.reduce_op import ReduceOp
from transport._tcp import TcpCommunicator
from transport._tcp import communicator as module
from transport._tcp.meeting.dial import Dial

TABLE = Thresholds(star=0, star_ranks=0, all_reduce_doubling=0)
TCP = Transport("tcp", TcpCommunicator)


def test_those_that_a_rank_makes_are_made_at_the_same_time(monkeypatch: Any) -> None:
    """Each of rank 3's is made only when all three have begun."""
    n = 4
    begun = threading.Barrier(n - 1, timeout=LONG)

    class SlowDial(Dial):
        def connect(self, call: Call) -> Any:
            if self._membership.rank == n - 1:
                begun.wait()
            return super().connect(call)

    monkeypatch.setattr(module, "Dial", SlowDial)

    def body(m: Member) -> None:
        for _ in range(2):
            x = np.full(1000, m.rank, np.float32)
            m.all_reduce(x, ReduceOp.SUM)
            assert (x == 6).all()
        assert len(m.comm._links) == n - 1  # pyright: ignore

    run_group(TCP, n, body, TABLE)
    assert begun.n_waiting == 0


def test_one_that_is_gone_is_missed_although_others_are_there() -> None:
    n, gone = 3, threading.Event()

    def body(m: Member) -> None:
        if m.rank == 0:
            m.comm.close()
            gone.set()
            return
        assert gone.wait(LONG)
        with pytest.raises((PeerLostError, CommunicatorAbortedError)):
            m.all_reduce(np.ones(1000, np.float32), ReduceOp.SUM)
        m.comm.abort("rank 0 is gone")

    run_group(TCP, n, body, TABLE)


def test_an_abort_ends_all_of_them() -> None:
    """Also before they have begun."""
    before = set(threading.enumerate())
    waiting = threading.Event()

    def body(m: Member) -> None:
        if m.rank < 2:
            assert waiting.wait(LONG)
            return

        def late(peers: Any, call: Call) -> None:
            aborter = threading.Thread(target=lambda: m.comm.abort("enough"))
            aborter.start()
            aborter.join(LONG)
            TcpCommunicator.reach(m.comm, peers, call)  # pyright: ignore

        m.comm.reach = late  # pyright: ignore
        try:
            call = m.call(Kind.ALL_TO_ALL, np.float32)
            parts = [np.ones(4, np.float32) for _ in range(3)]
            with pytest.raises(CommunicatorAbortedError, match="enough"):
                m.comm.all_to_all(call, parts, parts)
        finally:
            waiting.set()

    run_group(TCP, 3, body, TABLE)
    assert not [t for t in set(threading.enumerate()) - before if "dial" in t.name and t.join(LONG)]
