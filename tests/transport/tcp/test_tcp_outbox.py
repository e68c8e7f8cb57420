"""Frames that leave on several TCP links while others are received."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from rank_threads import LONG, run_threads
from tcp_pairs import call, links

from transport.call import Call
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport.link import OnPiece, Outbox
from transport.tcp.link import TcpLink

LARGE = 3_000_000  # more than the sockets of a pair hold between them, a few times


def payload(seed: int, size: int = LARGE) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).data


def space(size: int = LARGE) -> memoryview:
    return memoryview(bytearray(size))


def receive_on(
    outbox: Outbox, link: TcpLink, into: memoryview, on_piece: OnPiece | None = None
) -> None:
    """Receive the next frame of ``link``, of which none is expected, and wait for it."""
    outbox.expect(link, into)
    outbox.wait(link, on_piece)


def pass_on(link: TcpLink, of: Call, sent: int, received: int = 0) -> None:
    """Post ``sent`` large frames, and receive as many as ``received``."""
    with link.outbox(of) as outbox:
        for seed in range(sent):
            outbox.post(link, payload(seed))
        for _ in range(received):
            receive_on(outbox, link, space())


def test_much_leaves_both_ways_before_anything_is_received() -> None:
    """More than the sockets have room for: posting waits for nobody."""
    with links() as pair:

        def side(mine: int) -> None:
            link = pair[mine]
            with link.outbox(call()) as outbox:
                for i in range(6):
                    outbox.post(link, payload(10 * mine + i))
                for i in range(6):
                    into = space()
                    receive_on(outbox, link, into)
                    assert into == payload(10 * (1 - mine) + i)

        run_threads([lambda: side(0), lambda: side(1)])


def test_frames_leave_on_all_links_while_one_is_awaited() -> None:
    with links() as first, links() as second:
        received = threading.Event()

        def centre() -> None:
            with first[0].outbox(call()) as outbox:
                outbox.post(first[0], payload(1))
                outbox.post(second[0], payload(2))
                into = space(3)
                receive_on(outbox, first[0], into)
                assert into == b"123"
                assert received.is_set()  # by the other one, all of it, before

        def other() -> None:
            into = space()
            second[1].recv_into(call(), into)
            assert into == payload(2)
            received.set()

        def slow() -> None:
            assert received.wait(LONG)
            first[1].send(call(), memoryview(b"123"))
            into = space()
            first[1].recv_into(call(), into)
            assert into == payload(1)

        run_threads([centre, other, slow])


def test_all_peers_are_read_whichever_is_waited_for() -> None:
    """Rank 1's frame begins to leave only when all of rank 2's has been taken."""
    with links() as first, links() as second:
        taken = threading.Event()

        def centre() -> None:
            with first[0].outbox(call()) as outbox:
                one, two, small = space(), space(), space(3)
                outbox.expect(first[0], one)
                for into in (two, small):
                    outbox.expect(second[0], into)
                told: list[int] = []
                outbox.wait(first[0], told.append)
                assert one == payload(1)
                assert told == sorted(told)
                assert told[-1] == LARGE
                for _ in (two, small):
                    outbox.wait(second[0])
                assert (two, small) == (payload(2), b"123")

        def ahead() -> None:
            second[1].send(call(), payload(2))
            taken.set()
            second[1].send(call(), memoryview(b"123"))

        def slow() -> None:
            assert taken.wait(LONG)
            first[1].send(call(), payload(1))

        run_threads([centre, ahead, slow])


@pytest.mark.parametrize("what", ["hangs up", "is in another call"])
def test_a_peer_that_is_only_expected_is_missed_as_well(what: str) -> None:
    def wait(outbox: Outbox) -> None:
        with outbox:
            outbox.expect(first[0], space(3))
            outbox.expect(second[0], space(3))
            outbox.wait(first[0])

    with links() as first, links() as second:
        second[0].peer = 2
        if what == "hangs up":
            second[1].close()
        else:
            second[1].send(call(2), memoryview(b"123"))
        with pytest.raises((PeerLostError, HeaderMismatchError)) as raised:
            wait(first[0].outbox(call()))
        assert isinstance(raised.value, PeerLostError) == (what == "hangs up")
        assert raised.value.peer == 2


def test_pieces_are_told_and_small_frames_wait_for_large_ones() -> None:
    with links() as (ours, theirs):

        def send() -> None:
            with ours.outbox(call()) as outbox:
                outbox.post(ours, payload(1))
                outbox.post(ours, payload(2, 5))
                outbox.post(ours, payload(3, 0))

        def receive() -> None:
            told: list[int] = []
            with theirs.outbox(call()) as outbox:
                outbox.post(theirs, memoryview(b""))
                into = space()
                receive_on(outbox, theirs, into, told.append)
                assert into == payload(1)
                assert told == sorted(told)
                assert told[-1] == LARGE
                for seed, size in ((2, 5), (3, 0)):
                    into = space(size)
                    receive_on(outbox, theirs, into)
                    assert into == payload(seed, size)

        run_threads([send, receive])
        nothing = space(0)
        ours.recv_into(call(), nothing)


@pytest.mark.parametrize("receives", [0, 1])
def test_a_peer_that_takes_nothing_is_named_past_the_deadline(receives: int) -> None:
    with links() as (ours, _theirs):
        late = call(seconds=0.1)
        with pytest.raises(CommunicatorTimeoutError, match="rank 1") as error:
            pass_on(ours, late, 8, receives)
        assert error.value.peer == late.waiting_for == 1
        with pytest.raises(CommunicatorAbortedError, match="middle of a frame"):
            ours.send(call(), memoryview(b""))


def test_an_abort_wakes_who_waits_in_an_outbox_at_both_ends() -> None:
    with links() as (ours, theirs):
        waiting = call()

        def wait() -> None:
            with pytest.raises(CommunicatorAbortedError, match="enough"):
                pass_on(ours, waiting, 8, 1)

        def abort() -> None:
            while waiting.waiting_for is None:
                time.sleep(0.001)
            ours.abort("enough")

        def peer() -> None:
            with pytest.raises(PeerLostError):
                pass_on(theirs, call(), 0, 9)

        run_threads([wait, abort, peer])


@pytest.mark.parametrize("frames", [0, 8])
def test_a_peer_that_hangs_up_is_missed(frames: int) -> None:
    with links() as (ours, theirs):
        theirs.close()
        with pytest.raises(PeerLostError) as error:
            pass_on(ours, call(), frames, 1)
        assert error.value.peer == 1


def test_a_frame_of_another_call_is_a_mismatch() -> None:
    with links() as (ours, theirs):
        theirs.send(call(2), payload(1, 40))
        with pytest.raises(HeaderMismatchError, match=r"#1.*#2"):
            pass_on(ours, call(1), 1, 1)


def test_an_error_of_the_caller_leaves_the_links_free() -> None:
    def fail(outbox: Outbox) -> None:
        with outbox:
            outbox.post(ours, memoryview(b"ab"))
            raise KeyError

    with links() as (ours, theirs):
        with pytest.raises(KeyError):
            fail(ours.outbox(call()))
        into = space(2)
        theirs.recv_into(call(), into)
        theirs.send(call(), into)
        ours.recv_into(call(), into)
        assert into == b"ab"
