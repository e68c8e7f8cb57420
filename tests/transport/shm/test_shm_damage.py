"""A peer's writes into shared memory are checked before use, and no peer can truncate memory."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._errors import DistBackendError, DistError, PeerLostError
from transport._operands.reduce_op import ReduceOp
from transport._shm import ShmCommunicator
from transport._shm.segment import OwnedSegment, adopt
from transport._shm.sizes import Sizes
from transport._shm.support import the_core

SIZES = Sizes(block=1 << 12, direct=64, ring=1 << 12)
SHM = Transport("shm", lambda membership, _: ShmCommunicator(membership, SIZES), has_links=False)
COUNT = 3000

RINGS_AT = 4096  # in an inbox of a few members


@pytest.mark.parametrize("bit", [20, 39])
@pytest.mark.parametrize(
    "kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST], ids=lambda k: k.name
)
def test_a_wrong_place_is_refused_and_its_rank_named(kind: Kind, bit: int) -> None:
    """Rank 1 says that its array lies beside what a member has of symmetric memory, or far beyond:
    one bit of what it has noted about the call is wrong.
    """
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        call = member.call(Kind.ALLOCATE, np.float64, COUNT)
        array = member.comm.allocate(call, COUNT, np.dtype(np.float64))
        root = 1 if kind is Kind.BROADCAST else -1
        call = member.call(kind, array.dtype, COUNT, root=root)
        outputs = [np.zeros(COUNT), np.zeros(COUNT)]
        if member.rank == 1:
            calls: Any = member.comm._meeting.calls  # type: ignore[attr-defined]
            inputs = () if kind is Kind.ALL_REDUCE else [array]
            mine = {Kind.ALL_REDUCE: [array], Kind.ALL_GATHER: outputs, Kind.BROADCAST: ()}[kind]
            op = ReduceOp.SUM.code if kind is Kind.ALL_REDUCE else 0
            again = the_core().AGAIN
            assert calls.native.start(kind, max(root, 0), call, inputs, mine, op) == again
            data = calls.segment.data
            notes = bytes(data).index(call.packed) + 32
            place = notes + (8 * (2 + 2 * 2) if kind is Kind.ALL_GATHER else 0)
            assert data[place] == 1
            data[place + bit // 8] ^= 1 << bit % 8
            gate.wait()
            gate.wait()
            calls.native.stop()
            return
        make = {
            Kind.ALL_GATHER: lambda: member.comm.all_gather(call, outputs, array),
            Kind.BROADCAST: lambda: member.comm.broadcast(call, array, 1),
            Kind.ALL_REDUCE: lambda: member.comm.all_reduce(call, array, ReduceOp.SUM),
        }[kind]
        gate.wait()
        with pytest.raises(DistBackendError, match=r"rank 1 .* damaged"):
            make()
        gate.wait()

    run_group(SHM, 2, body)


@pytest.mark.parametrize("bit", [0, 30, 63])
def test_a_damaged_size_is_refused(bit: int) -> None:
    """One bit of the size that stands before a message is wrong."""
    core = the_core()
    nbytes, capacity = core.measure_inbox(2, 1 << 12)
    segment = OwnedSegment(nbytes, "test")
    core.create_inbox(segment.mapping, 2, capacity)
    sender, receiver = (core.RingEnd(segment.mapping, 2, 1, me, True) for me in (1, 0))
    header = CallHeader(1, 0, NO_ROOT, Kind.SEND, 3, 0)
    sender.begin(header.pack(), memoryview(b""), core.LOOK)
    assert receiver.peek() == (header.pack(), 0)
    at = RINGS_AT + capacity + len(header.pack())  # the ring from rank 1
    segment.data[at + bit // 8] ^= 1 << bit % 8
    assert receiver.peek() is None


def test_a_damaged_message_is_a_lost_peer_and_named() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        x = np.ones(8)
        if member.rank == 1:
            member.recv(x, 0)
            mailbox: Any = member.comm.mailbox  # type: ignore[attr-defined]
            data = mailbox.inbox.data
            member.send(x, 0)  # rank 0 has read what is next: nothing yet
            at = RINGS_AT  # the ring from rank 0
            while bytes(data[at + 136 : at + 144]) == bytes(8):  # the second message
                time.sleep(0.001)
            data[at + 128 + 32 : at + 128 + 40] = b"\xff" * 8  # its size
            with pytest.raises(PeerLostError, match=r"rank 0 .* damaged"):
                member.recv(x, 0)
            gate.wait()
        else:
            member.send(x, 1)
            member.recv(x, 1)
            member.send(x, 1)
            gate.wait()

    run_group(SHM, 2, body)


def test_no_peer_can_change_the_size_of_a_segment() -> None:
    segment = OwnedSegment(1 << 14, "test")
    fd = os.dup(segment.fd)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    assert adopt(fd).nbytes == 1 << 14


def test_memory_that_could_be_cut_off_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 14)
    with pytest.raises(DistError, match="sealed"):
        adopt(fd)
