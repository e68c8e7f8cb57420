"""Trouble, on every transport: deadlines, aborts, peers that leave, and members that disagree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, TINY, Member, Transport, run_group
from transport._calls.call import Call
from transport._calls.header import CallHeader, Kind
from transport._choosing.choice import DEFAULT
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport._links.communicator import LinkCommunicator
from transport._net.sockets import recv_exact_into
from transport._operands.flat import part_bounds, segments_of
from transport._operands.reduce_op import ReduceOp
from transport._tcp.link import TcpLink
from transport._waiting.deadline import Deadline


def gather_gates(n: int) -> threading.Barrier:
    """A meeting point outside the transport, for steps that must not overlap."""
    return threading.Barrier(n, timeout=LONG)


def wait_until_blocked(call: Call, peer: int) -> None:
    """Return when the thread in ``call`` says that it waits for ``peer``."""
    deadline = Deadline.after(LONG)
    while call.waiting_for != peer:
        assert not deadline.expired, f"never waited for {peer}"
        time.sleep(0.005)


def test_abort_from_another_thread_wakes_the_member_and_who_waits_for_it(
    transport: Transport,
) -> None:
    def body(member: Member) -> None:
        member.meet()
        buffer = np.zeros(4, np.float32)
        if member.rank == 1:  # waits for rank 0, which will never broadcast
            call = member.call(Kind.BROADCAST, buffer.dtype, 4, root=0)
            with pytest.raises(PeerLostError) as lost:
                member.comm.broadcast(call, buffer, 0)
            assert lost.value.peer == 0
        else:  # waits for rank 1, which will never gather
            call = member.call(Kind.GATHER, buffer.dtype, root=0)

            def wait() -> None:
                if transport.has_links:
                    member.comm.gather(call, [buffer, buffer.copy()], buffer, 0)
                else:  # members see at once that they are in different collectives
                    member.comm.recv(call, buffer, 1, 0)

            def abort() -> None:
                wait_until_blocked(call, 1)
                time.sleep(0.1)  # let rank 1 block as well
                member.comm.abort("enough of this")

            aborter = threading.Thread(target=abort)
            aborter.start()
            with pytest.raises(CommunicatorAbortedError, match="enough of this"):
                wait()
            aborter.join(LONG)
            member.comm.abort("a second reason")
            for again in (member.barrier, lambda: member.send(buffer, 1)):
                with pytest.raises(CommunicatorAbortedError, match="enough of this"):
                    again()
            with pytest.raises(CommunicatorAbortedError, match="enough of this"):
                member.recv(buffer, None)

    run_group(transport, 2, body, TINY)


def test_abort_wakes_point_to_point_calls(transport: Transport) -> None:
    def body(member: Member) -> None:
        member.meet()
        buffer = np.zeros(4, np.float32)
        if member.rank == 0:
            call = member.call(Kind.RECV, buffer.dtype, 4)

            def abort() -> None:
                wait_until_blocked(call, 1)
                member.comm.abort("enough of this")

            aborter = threading.Thread(target=abort)
            aborter.start()
            with pytest.raises(CommunicatorAbortedError, match="enough of this"):
                member.comm.recv(call, buffer, 1, 0)
            aborter.join(LONG)
        else:
            with pytest.raises(PeerLostError) as lost:
                member.recv(buffer, 0)
            assert lost.value.peer == 0

    run_group(transport, 2, body, TINY)


def _barrier(member: Member, timeout: float) -> None:
    member.barrier(timeout)


def _small(member: Member, timeout: float) -> None:
    member.all_reduce(np.ones(2, np.float32), ReduceOp.SUM, timeout)


def _large(member: Member, timeout: float) -> None:
    member.all_reduce(np.ones(3_000_000, np.float32), ReduceOp.SUM, timeout)


def _recv(member: Member, timeout: float) -> None:
    member.recv(np.ones(2, np.float32), 1, timeout=timeout)


@pytest.mark.parametrize("wait", [_barrier, _small, _large, _recv])
def test_a_deadline_ends_the_wait_and_names_the_peer(
    transport: Transport, wait: Callable[[Member, float], None]
) -> None:
    gate = gather_gates(2)

    def body(member: Member) -> None:
        gate.wait()
        if member.rank == 0:
            started = time.monotonic()
            with pytest.raises(CommunicatorTimeoutError, match="rank 9") as late:
                wait(member, 0.3)
            assert late.value.peer == 1
            assert time.monotonic() - started > 0.29
        gate.wait()

    run_group(transport, 2, body, global_ranks=(4, 9))


def test_a_deadline_ends_a_call_that_was_under_way(transport: Transport) -> None:
    """The links are open and in use already when the peer stops coming."""
    gate = gather_gates(2)

    def body(member: Member) -> None:
        for _ in range(5):
            member.barrier()
        gate.wait()
        if member.rank == 0:
            with pytest.raises(CommunicatorTimeoutError, match="rank 1") as late:
                _large(member, 0.3)
            assert late.value.peer == 1
        gate.wait()

    run_group(transport, 2, body)


BASE = CallHeader(sequence=7, elements=6, root=-1, kind=Kind.ALL_REDUCE, dtype=11, op=1)
DISAGREEMENTS = {
    "op": BASE._replace(op=4),
    "dtype": BASE._replace(dtype=7),
    "elements": BASE._replace(elements=5),
    "root": BASE._replace(root=1),
    "kind": BASE._replace(kind=Kind.REDUCE),
    "sequence": BASE._replace(sequence=8),
    "extra": BASE._replace(extra=77),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("scale", [1, 50, 100_000], ids=["small", "ring", "large"])
def test_both_members_of_a_mismatch_raise_and_keep_their_data(
    transport: Transport, what: str, scale: int
) -> None:
    gate = gather_gates(2)
    headers = [BASE, DISAGREEMENTS[what]]

    def body(member: Member) -> None:
        header = headers[member.rank]
        buffer = np.full(header.elements * scale, member.rank + 1, np.float32)
        before = buffer.copy()
        call = Call(header._replace(elements=buffer.size), Deadline.after(LONG))
        gate.wait()
        with pytest.raises(HeaderMismatchError) as mismatch:
            member.comm.all_reduce(call, buffer, ReduceOp.SUM)
        gate.wait()
        error = mismatch.value
        assert error.peer == 1 - member.rank
        assert error.expected == call.header
        other = headers[1 - member.rank]
        assert error.received == other._replace(elements=other.elements * scale)
        assert np.array_equal(buffer, before)

    run_group(transport, 2, body, TINY)


def test_a_receiver_notices_a_collective_that_only_sends(transport: Transport) -> None:
    gate = gather_gates(2)

    def body(member: Member) -> None:
        buffer = np.full(3, member.rank, np.float32)
        if member.rank == 0:
            call = member.call(Kind.BROADCAST, buffer.dtype, 3, root=0)
            with suppress(HeaderMismatchError):  # it may learn it as well
                member.comm.broadcast(call, buffer, 0)
        else:
            with pytest.raises(HeaderMismatchError, match=r"all_reduce.*broadcast"):
                member.all_reduce(buffer, ReduceOp.SUM)
            assert (buffer == 1).all()
        gate.wait()

    run_group(transport, 2, body, TINY)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (0, 1), (1, 0), (400_000, 400_001)])
def test_a_frame_of_another_length_is_refused(transport: Transport, sizes: tuple[int, int]) -> None:
    """Rank 0 expects ``sizes[0]`` elements from rank 1, which sends ``sizes[1]``."""
    gate = gather_gates(2)

    def body(member: Member) -> None:
        own = np.ones(2 if member.rank == 0 else sizes[1], np.float32)
        outputs = [np.zeros(2, np.float32), np.zeros(sizes[member.rank], np.float32)]
        call = member.call(Kind.ALL_GATHER, own.dtype)
        if member.rank == 1 and transport.has_links:
            # Where so much is not buffered, it is still sending when rank 0 gives up.
            with suppress(PeerLostError):
                member.comm.all_gather(call, outputs, own)
                assert (outputs[0] == 1).all()
        elif member.rank == 1:
            with pytest.raises(HeaderMismatchError, match=f"{4 * sizes[0]} bytes"):
                member.comm.all_gather(call, outputs, own)
        else:
            with pytest.raises(HeaderMismatchError, match=f"{4 * sizes[1]} bytes"):
                member.comm.all_gather(call, outputs, own)
            assert (outputs[1] == 0).all()
            member.comm.abort("a frame of another length")
        gate.wait()

    run_group(transport, 2, body, TINY)


@pytest.mark.parametrize("wait", [_barrier, _small, _large, _recv])
@pytest.mark.parametrize("opened", [False, True], ids=["before its first call", "later"])
def test_a_peer_that_closes_is_missed_at_once(
    transport: Transport, wait: Callable[[Member, float], None], opened: bool
) -> None:
    def body(member: Member) -> None:
        if opened:
            member.meet()
        if member.rank == 1:
            time.sleep(0.1)  # most likely rank 0 waits by now; it must not matter
            member.comm.close()
            member.comm.close()
            with pytest.raises(CommunicatorAbortedError, match="closed"):
                member.barrier()
        else:
            with pytest.raises(PeerLostError, match="rank 1") as lost:
                wait(member, LONG)
            assert lost.value.peer == 1

    run_group(transport, 2, body, seconds=2 * LONG)


def test_a_peer_that_closes_in_the_middle_of_a_transfer_is_missed(transport: Transport) -> None:
    """It receives a first part of a large broadcast, and leaves."""
    if not transport.shows_links:
        pytest.skip(f"{transport} shows no links; it has a test of its own for this")
    if str(transport) == "queues":
        pytest.skip("a queue takes everything, so the sender may have ended when its peer leaves")
    n = 3

    def body(member: Member) -> Any:
        buffer = np.zeros(4_000_000, np.float32)
        if member.rank == 2:
            header = CallHeader(1, buffer.size, 0, Kind.BROADCAST, 11, 0)
            laps = segments_of(buffer.nbytes, DEFAULT.segment)
            first = np.empty(4 * part_bounds(buffer.size, laps, 0)[1], np.uint8)
            assert isinstance(member.comm, LinkCommunicator)
            link = member.comm.link(1, Call(header, Deadline.after(LONG)))
            if isinstance(link, TcpLink):  # all is one frame
                recv_exact_into(link.first, first.data, Deadline.after(LONG))
            else:
                link.recv_into(Call(header, Deadline.after(LONG)), first.data)
            member.comm.close()
            return None
        call = member.call(Kind.BROADCAST, buffer.dtype, buffer.size, root=0)
        if member.rank == 1:
            with pytest.raises(PeerLostError) as lost:
                member.comm.broadcast(call, buffer, 0)
            assert lost.value.peer == 2
            member.comm.abort("lost rank 2")
        else:
            with suppress(PeerLostError):  # rank 1 may have all of it by then
                member.comm.broadcast(call, buffer, 0)
            with pytest.raises(PeerLostError) as lost:
                member.recv(buffer, 1, tag=1)
            assert lost.value.peer == 1
        return None

    run_group(transport, n, body)


def test_what_was_sent_before_close_still_arrives(transport: Transport) -> None:
    closed = threading.Event()

    def body(member: Member) -> None:
        buffer = np.full(1000, member.rank, np.float32)
        member.barrier()
        if member.rank == 0:
            member.comm.broadcast(
                member.call(Kind.BROADCAST, buffer.dtype, 1000, root=0), buffer, 0
            )
            member.send(buffer, 1, tag=3)
            member.comm.close()
            closed.set()
        else:
            if transport.name != "inproc-unbuffered":
                assert closed.wait(LONG)
            member.comm.broadcast(
                member.call(Kind.BROADCAST, buffer.dtype, 1000, root=0), buffer, 0
            )
            assert (buffer == 0).all()
            buffer[:] = 1
            assert member.recv(buffer, 0, tag=3) == 0
            assert (buffer == 0).all()
            with pytest.raises(PeerLostError):
                member.recv(buffer, 0, tag=3)

    run_group(transport, 2, body)


def test_aborting_and_closing_without_a_call_leaves_nothing(transport: Transport) -> None:
    before = set(threading.enumerate())

    def body(member: Member) -> None:
        if member.rank == 0:
            member.comm.abort("never mind")
        member.comm.close()

    run_group(transport, 3, body)
    deadline = Deadline.after(LONG)
    while set(threading.enumerate()) - before:
        assert not deadline.expired, set(threading.enumerate()) - before
        time.sleep(0.01)
