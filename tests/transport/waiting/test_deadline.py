"""Deadlines far away: no wait ends before its own, however it is cut into pieces."""

from __future__ import annotations

import math
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._choosing.choice import Thresholds
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._hierarchical.auto import choose
from transport._inproc.communicator import InprocCommunicator
from transport._net.sockets import recv_exact, send_all
from transport._operands.reduce_op import ReduceOp
from transport._place import Place
from transport._shm import ShmCommunicator
from transport._tcp import TcpCommunicator
from transport._waiting.deadline import Deadline

PIECE, LATE = 0.02, 0.4


def _two_hosts(membership: Membership, table: Thresholds) -> Communicator:
    places = tuple(Place(f"host {rank}") for rank in range(membership.size))
    return choose(replace(membership, places=places), table)


def _shm(membership: Membership, _table: Thresholds) -> Communicator:
    return ShmCommunicator(membership)


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport._waiting.deadline.LONGEST_WAIT", PIECE)


@pytest.mark.parametrize("make", [InprocCommunicator, TcpCommunicator, _shm, _two_hosts])
@pytest.mark.usefixtures("short_pieces")
def test_a_late_member_of_the_group(make) -> None:  # type: ignore[no-untyped-def]
    """The others wait for it in the group's store, then at its endpoint, then in their call."""

    def late(membership: Membership, table: Thresholds) -> Communicator:
        if membership.rank == 1:
            time.sleep(LATE)
        return make(membership, table)

    def body(member: Member) -> float:
        data = np.ones(1)
        member.all_reduce(data, ReduceOp.SUM)
        if member.rank == 1:
            time.sleep(LATE)
            member.send(data, 0)
        else:
            member.recv(data, 1)
        return float(data[0])

    assert run_group(Transport("late", late), 2, body) == [2.0, 2.0]


def test_what_is_left_is_all_that_is_left() -> None:
    assert Deadline.after(7200.0).remaining() > 3600.0
    left = Deadline.after(math.inf).remaining()
    assert threading.Lock().acquire(timeout=left)
    assert Deadline.after(math.inf).piece() <= 3600.0
    assert Deadline.after(0.0).remaining() == 0.0


@pytest.mark.usefixtures("short_pieces")
def test_late_bytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Timer(LATE / 2, lambda: theirs.sendall(b"late")).start()
        assert recv_exact(ours, 4, Deadline.after(10.0)) == b"late"
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            recv_exact(ours, 1, Deadline.after(0.1))


@pytest.mark.usefixtures("short_pieces")
def test_a_receiver_that_takes_bytes_late() -> None:
    ours, theirs = socket.socketpair()
    data = bytes(range(256)) * 8192
    got: list[bytes] = []

    def receive() -> None:
        time.sleep(LATE / 2)
        got.append(recv_exact(theirs, len(data), Deadline.after(10.0)))

    with ours, theirs:
        thread = threading.Thread(target=receive)
        thread.start()
        send_all(ours, data, Deadline.after(10.0))
        thread.join()
        assert got == [data]
        with pytest.raises(TimeoutError, match=r"within 0\.1 s"):
            send_all(ours, data, Deadline.after(0.1))
