"""Point to point, on every transport: matching, order, both directions, mismatch, limits."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._calls.header import Kind
from transport._errors import CommunicatorTimeoutError, HeaderMismatchError, PeerLostError
from transport._operands.reduce_op import ReduceOp
from transport._waiting.deadline import Deadline


def number(value: float) -> np.ndarray:
    return np.array([value], np.float64)


def test_messages_match_by_tag_and_never_overtake(transport: Transport) -> None:
    count, tags = 30, (0, 5, 2**32 - 1)

    def body(member: Member) -> None:
        if member.rank == 0:
            for i in range(count):
                for tag in tags:
                    member.send(number(i), 1, tag)
        else:
            got = number(-1)
            for tag in reversed(tags):
                for i in range(count):
                    assert member.recv(got, 0, tag) == 0
                    assert got[0] == i

    run_group(transport, 2, body)


def test_any_source_returns_the_sender_and_keeps_each_ones_order(transport: Transport) -> None:
    n, count = 4, 20

    def body(member: Member) -> None:
        if member.rank:
            for i in range(count):
                member.send(number(100 * member.rank + i), 0, tag=2)
            return
        last = [-1] * n
        for _ in range(count * (n - 1)):
            got = number(-1)
            src = member.recv(got, None, tag=2)
            assert divmod(int(got[0]), 100) == (src, last[src] + 1)
            last[src] += 1

    run_group(transport, n, body)


def test_any_source_leaves_other_tags_alone(transport: Transport) -> None:
    def body(member: Member) -> None:
        if member.rank == 0:
            member.send(number(1), 1, tag=1)
            member.send(number(2), 1, tag=2)
        else:
            got = number(0)
            assert member.recv(got, None, tag=2) == 0
            assert got[0] == 2
            assert member.recv(got, None, tag=1) == 0
            assert got[0] == 1

    run_group(transport, 2, body)


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_message_to_oneself_is_buffered(transport: Transport, size: int) -> None:
    def body(member: Member) -> None:
        sent = np.arange(size, dtype=np.float32)
        member.send(sent, member.rank, tag=4)
        member.send(sent + 1, member.rank, tag=4)
        for more in (0, 1):
            got = np.zeros(size, np.float32)
            assert member.recv(got, None if more else member.rank, tag=4) == member.rank
            assert np.array_equal(got, sent + more)

    run_group(transport, 2, body)


@pytest.mark.parametrize("receive_first", [True, False])
def test_large_messages_cross_in_both_directions(transport: Transport, receive_first: bool) -> None:
    size = 3_000_017

    def body(member: Member) -> None:
        peer = 1 - member.rank
        sent = np.full(size, member.rank, np.float32)
        got = np.full(size, -1, np.float32)
        posted = threading.Event()

        def receive() -> None:
            posted.set()
            assert member.recv(got, peer) == peer

        def send() -> None:
            if receive_first:
                posted.wait(LONG)
                time.sleep(0.05)
            member.send(sent, peer)

        run_threads([receive, send])
        assert (got == peer).all()

    run_group(transport, 2, body)


def test_all_pairs_at_once_while_collectives_run(transport: Transport) -> None:
    n, count = 4, 15

    def body(member: Member) -> None:
        others = [rank for rank in range(n) if rank != member.rank]

        def sends() -> None:
            for i in range(count):
                for peer in others:
                    member.send(np.full(1 + 700 * i, i + peer, np.int32), peer, tag=member.rank)

        def receives(peer: int) -> None:
            for i in range(count):
                got = np.zeros(1 + 700 * i, np.int32)
                assert member.recv(got, peer, tag=peer) == peer
                assert (got == i + member.rank).all()

        def collectives() -> None:
            for _ in range(count):
                buffer = np.ones(3000, np.int64)
                member.all_reduce(buffer, ReduceOp.SUM)
                assert (buffer == n).all()

        run_threads([sends, collectives, *(lambda p=p: receives(p) for p in others)])

    run_group(transport, n, body)


@pytest.mark.parametrize("posted", [True, False], ids=["posted", "stored"])
@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (np.arange(4, dtype=np.float32), np.zeros(4, np.int32)),
        (np.arange(4, dtype=np.float32), np.zeros(5, np.float32)),
        (np.arange(4, dtype=np.float32), np.zeros(2, np.float64)),
        (np.zeros(0, np.float32), np.zeros(2, np.float32)),
        (np.arange(300_000, dtype=np.float32), np.zeros(2, np.float32)),
    ],
    ids=["dtype", "size", "both", "empty", "large"],
)
def test_a_message_that_does_not_fit_is_refused_with_both_sizes(
    transport: Transport, posted: bool, sent: np.ndarray, got: np.ndarray
) -> None:
    turn = threading.Event()

    def body(member: Member) -> None:
        if member.rank == 0:
            if posted:
                assert turn.wait(LONG)
                time.sleep(0.1)
            member.send(sent, 1, tag=7)
            member.send(number(5), 1, tag=7)
            turn.set()
            return
        if posted:
            turn.set()
        else:
            assert turn.wait(LONG)
        into = got.copy()
        with pytest.raises(HeaderMismatchError) as mismatch:
            member.recv(into, 0, tag=7)
        for part in (
            f"{sent.size} elements of {sent.dtype}",
            f"{into.size} of {into.dtype}",
            "rank 0",
            "tag 7",
        ):
            assert part in str(mismatch.value)
        assert mismatch.value.peer == 0
        assert (into == got).all()
        after = number(0)
        member.recv(after, 0, tag=7)  # the message was consumed, and only that one
        assert after[0] == 5

    run_group(transport, 2, body)


def test_unclaimed_messages_are_bounded(transport: Transport) -> None:
    """A sender that nobody receives from is held up, until its deadline."""
    sent = 0
    done = threading.Event()

    def body(member: Member) -> None:
        if member.rank == 1:
            assert done.wait(LONG)
            return

        def flood() -> None:
            nonlocal sent
            for _ in range(200):
                seconds = 1.0 if sent else LONG  # the first one finds the way
                member.send(np.zeros(1 << 20, np.uint8), 1, timeout=seconds)
                sent += 1

        try:
            with pytest.raises(CommunicatorTimeoutError, match="rank 1"):
                flood()
        finally:
            done.set()

    run_group(transport, 2, body)
    assert 1 <= sent < 100


def test_a_message_behind_many_unclaimed_ones_is_reached(transport: Transport) -> None:
    """Backpressure never hides the one message that a receiver waits for."""
    count = 24

    def body(member: Member) -> None:
        block = np.zeros(1 << 20, np.uint8)
        if member.rank == 0:
            for i in range(count):
                block[:] = i
                member.send(block, 1, tag=1)
            member.send(number(9), 1, tag=2)
        else:
            got = number(0)
            assert member.recv(got, 0, tag=2) == 0
            assert got[0] == 9
            for i in range(count):
                member.recv(block, 0, tag=1)
                assert (block == i).all()

    run_group(transport, 2, body)


def test_a_source_that_left_is_lost_once_its_messages_are_taken(transport: Transport) -> None:
    def body(member: Member) -> None:
        if member.rank == 1:
            member.send(number(1), 0)
            member.send(number(2), 0)
        if member.rank:
            return  # the group's end closes
        got = number(0)
        for value in (1, 2):
            assert member.recv(got, 1) == 1
            assert got[0] == value
        with pytest.raises(PeerLostError) as lost:
            member.recv(got, 1)
        assert lost.value.peer == 1

        def send_on() -> None:
            for _ in range(20):  # a network may take a few before it knows
                member.send(np.zeros(1 << 20, np.uint8), 1, timeout=LONG)

        with pytest.raises(PeerLostError, match="rank 1"):
            send_on()

    run_group(transport, 2, body)


def test_any_source_goes_on_while_one_member_is_left(transport: Transport) -> None:
    left = threading.Event()

    def body(member: Member) -> None:
        if member.rank == 1:
            member.send(number(1), 0)
            member.comm.close()
            left.set()
        elif member.rank == 2:
            assert left.wait(LONG)
            time.sleep(0.1)
            member.send(number(2), 0)
        else:
            got = number(0)
            assert {member.recv(got, None), member.recv(got, None)} == {1, 2}
            with pytest.raises(PeerLostError, match="all others"):
                member.recv(got, None)

    run_group(transport, 3, body)


def test_a_receive_that_timed_out_takes_no_later_message(transport: Transport) -> None:
    def body(member: Member) -> None:
        member.barrier()
        got = number(0)
        if member.rank == 1:
            with pytest.raises(CommunicatorTimeoutError, match="any member") as late:
                member.recv(got, None, timeout=0.05)
            assert late.value.peer is None
        member.barrier()
        if member.rank == 0:
            member.send(number(3), 1)
        else:
            assert member.recv(got, 0) == 0
            assert got[0] == 3

    run_group(transport, 2, body)


def test_the_call_names_the_awaited_peer(transport: Transport) -> None:
    waits = threading.Event()

    def body(member: Member) -> None:
        if member.rank == 0:
            assert waits.wait(LONG)
            member.send(number(1), 1)
            return
        got = number(0)
        call = member.call(Kind.RECV, got.dtype, 1)
        assert call.waiting_for is None
        thread = threading.Thread(target=member.comm.recv, args=(call, got, 0, 0))
        thread.start()
        deadline = Deadline.after(LONG)
        while call.waiting_for != 0:
            assert not deadline.expired
            time.sleep(0.01)
        waits.set()
        thread.join(LONG)

    run_group(transport, 2, body)
