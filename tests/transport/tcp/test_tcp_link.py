"""One TCP link, or a few: frames whole, deadlines kept, peers missed, threads woken."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.net.tcp_pairs import LONG, call, links, sockets
from tests.support.transport.rank_threads import run_threads
from transport._calls.header import CallHeader
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport._link import exchange
from transport._tcp.frame import PREFIX_BYTES, SMALL_BYTES, pack_prefix, parse_prefix
from transport._tcp.link import FrameWorker, TcpLink

SIZES = [0, 1, 8, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1, 1 << 20, 5_000_001]


def payload(size: int, seed: int = 0) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).data


def space(size: int) -> memoryview:
    return memoryview(bytearray(size))


def raw_frame(data: memoryview, sequence: int = 1) -> bytes:
    return pack_prefix(call(sequence), len(data)) + data


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_frames_arrive_whole_and_in_order(size: int, host: str) -> None:
    with links(host) as (ours, theirs):

        def send() -> None:
            for sequence in range(3):
                ours.send(call(sequence), payload(size, sequence))

        def receive() -> None:
            for sequence in range(3):
                into = space(size)
                theirs.recv_into(call(sequence), into)
                assert into == payload(size, sequence)

        run_threads([send, receive])


@pytest.mark.parametrize("sizes", [(8, 8), (0, 3_000_000), (3_000_000, 100), (6_000_000,) * 2])
def test_exchange_moves_both_ways_at_once(sizes: tuple[int, int]) -> None:
    with links() as pair:

        def side(mine: int) -> None:
            link, other = pair[mine], 1 - mine
            for sequence in range(3):
                into = space(sizes[other])
                exchange(call(sequence), link, payload(sizes[mine], mine), link, into)
                assert into == payload(sizes[other], other)

        run_threads([lambda: side(0), lambda: side(1)])


@pytest.mark.parametrize("size", [100, 8_000_000])
def test_a_ring_of_exchanges_does_not_deadlock(size: int) -> None:
    a, b, c = FrameWorker(), FrameWorker(), FrameWorker()
    with (
        links(workers=(a, b)) as first,
        links(workers=(b, c)) as second,
        links(workers=(c, a)) as third,
    ):
        onward = [first[0], second[0], third[0]]
        behind = [third[1], first[1], second[1]]

        def member(rank: int) -> None:
            into = space(size)
            exchange(call(), onward[rank], payload(size, rank), behind[rank], into)
            assert into == payload(size, (rank - 1) % 3)

        run_threads([lambda rank=rank: member(rank) for rank in range(3)])


@pytest.mark.parametrize("size", [0, 100, 2_000_000])
def test_pieces_are_reported_while_they_arrive(size: int) -> None:
    expected = payload(size)
    with links() as (ours, theirs):
        into = space(size)
        progress: list[int] = []

        def on_piece(received: int) -> None:
            assert into[:received] == expected[:received]
            progress.append(received)

        def receive() -> None:
            exchange(call(), theirs, payload(3, 1), theirs, into, on_piece)

        run_threads([lambda: exchange(call(), ours, expected, ours, space(3)), receive])
        assert progress == sorted(progress)
        assert progress[-1:] == ([size] if size else [])


@pytest.mark.parametrize("size", [5, SMALL_BYTES + 5])
def test_a_frame_that_arrives_byte_by_byte_is_put_together(size: int) -> None:
    frame = raw_frame(payload(size))
    with sockets() as (ours, theirs):
        link = TcpLink((theirs,), 0, "rank 0")
        into = space(size)

        def dribble() -> None:
            for i in range(PREFIX_BYTES + 3):
                ours.send(frame[i : i + 1])
            ours.sendall(frame[PREFIX_BYTES + 3 :])

        run_threads([dribble, lambda: link.recv_into(call(), into)])
        assert into == payload(size)
        link.close()


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("announced", [0, 9, 11, 200_000, 1 << 60])
def test_a_frame_of_another_length_leaves_the_buffer_alone(size: int, announced: int) -> None:
    prefix = raw_frame(payload(0))[:PREFIX_BYTES]
    length = announced.to_bytes(8, "little")
    frame = prefix[: PREFIX_BYTES - 32] + length + prefix[PREFIX_BYTES - 24 :]
    assert (parse_prefix(frame).header, parse_prefix(frame).size) == (call().header, announced)
    with sockets() as (ours, theirs):
        link = TcpLink((theirs,), 0, "rank 4")
        ours.sendall(frame + bytes(range(9)))
        into = space(size)
        with pytest.raises(HeaderMismatchError, match=f"rank 4 sent {announced} bytes") as wrong:
            link.recv_into(call(), into)
        assert wrong.value.expected == wrong.value.received == call().header
        assert not any(into)
        with pytest.raises(CommunicatorAbortedError, match="middle of a frame"):
            link.recv_into(call(), into)
        link.close()


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), size=st.sampled_from([0, 3, SMALL_BYTES + 1]))
def test_random_bytes_are_refused_and_never_land_in_the_buffer(data: bytes, size: int) -> None:
    with sockets() as (ours, theirs):
        link = TcpLink((theirs,), 0, "rank 0")
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        into = space(size)
        expected = HeaderMismatchError if len(data) >= PREFIX_BYTES else PeerLostError
        with pytest.raises(expected):
            link.recv_into(call(), into)
        assert not any(into)
        link.close()


def test_a_frame_of_another_call_is_refused() -> None:
    with links() as (ours, theirs):
        ours.send(call(7), payload(4))
        with pytest.raises(HeaderMismatchError, match=r"in call #8.*rank 0 in call #7") as wrong:
            theirs.recv_into(call(8), space(4))
        assert isinstance(wrong.value.received, CallHeader)
        assert wrong.value.received.sequence == 7
        assert wrong.value.peer == 0


@pytest.mark.parametrize("seconds", [0, 0.2, 1.2])
def test_a_deadline_ends_a_receive(seconds: float) -> None:
    with links() as (ours, _):
        began = time.monotonic()
        with pytest.raises(CommunicatorTimeoutError, match="rank 1 sent nothing") as late:
            ours.recv_into(call(seconds=seconds), space(8))
        assert time.monotonic() - began >= seconds - 0.01
        assert late.value.peer == 1


@pytest.mark.parametrize("both", [False, True])
def test_a_deadline_ends_a_send_and_half_a_frame_ends_the_link(both: bool) -> None:
    with links() as (ours, theirs):
        data = payload(100_000_000)
        doomed = call(seconds=0.3)
        with pytest.raises(CommunicatorTimeoutError, match="rank 1 read nothing"):
            exchange(doomed, ours, data, ours, space(10)) if both else ours.send(doomed, data)
        with pytest.raises(CommunicatorAbortedError, match="middle of a frame"):
            ours.send(call(), payload(1))
        with pytest.raises(PeerLostError, match="rank 0"):
            theirs.recv_into(call(), space(len(data)))


def _receive(link: TcpLink) -> None:
    link.recv_into(call(), space(8))


def _receive_large(link: TcpLink) -> None:
    link.recv_into(call(), space(1_000_000))


def _send(link: TcpLink) -> None:
    link.send(call(), payload(100_000_000))


def _exchange(link: TcpLink) -> None:
    exchange(call(), link, payload(100_000_000), link, space(100_000))


WAITS = [_receive, _receive_large, _send, _exchange]


@pytest.mark.parametrize("wait", WAITS)
def test_abort_wakes_both_ends(wait: Callable[[TcpLink], None]) -> None:
    with links() as (ours, theirs):
        errors: list[Any] = []

        def blocked(link: TcpLink) -> None:
            try:
                wait(link)
            except (CommunicatorAbortedError, PeerLostError) as error:
                errors.append(error)

        # Two that wait for each other's data, or for room, get nowhere.
        ends = (ours, theirs) if wait in (_receive, _receive_large, _send) else (ours,)
        threads = [threading.Thread(target=blocked, args=(end,), daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        ours.abort("enough")
        ours.abort("too late")
        for thread in threads:
            thread.join(LONG)
        assert not any(thread.is_alive() for thread in threads)
        kinds = sorted(type(error).__name__ for error in errors)
        assert kinds == ["CommunicatorAbortedError", "PeerLostError"][: len(ends)]
        for again in (_receive, _send):
            with pytest.raises(CommunicatorAbortedError, match="enough"):
                again(ours)


@pytest.mark.parametrize("wait", WAITS)
def test_a_peer_that_hangs_up_is_missed(wait: Callable[[TcpLink], None]) -> None:
    with links() as (ours, theirs):
        hang_up = threading.Timer(0.2, theirs.close)
        hang_up.start()
        with pytest.raises(PeerLostError, match="rank 1") as lost:
            wait(ours)
        assert lost.value.peer == 1
        hang_up.join()


def test_what_was_sent_before_close_arrives() -> None:
    with links() as (ours, theirs):
        data = payload(200_000)
        run_threads([lambda: (ours.send(call(), data), ours.close())])
        into = space(len(data))
        theirs.recv_into(call(), into)
        assert into == data
        with pytest.raises(PeerLostError):
            theirs.recv_into(call(2), into)


def test_a_socket_that_is_closed_under_a_call_is_closed_by_it() -> None:
    with sockets() as (sock, _):
        link = TcpLink((sock,), 1, "rank 1")

        def receive() -> None:
            with pytest.raises(CommunicatorAbortedError, match="closed"):
                link.recv_into(call(), space(8))

        timer = threading.Timer(0.1, link.close)
        timer.start()
        run_threads([receive])
        timer.join()
        assert sock.fileno() == -1
        link.close()


def test_waiting_leaves_the_core_to_others() -> None:
    much = payload(100_000_000)
    with links() as (ours, _):
        before = time.thread_time()
        with pytest.raises(CommunicatorTimeoutError):
            ours.recv_into(call(seconds=1.5), space(8))
        with pytest.raises(CommunicatorTimeoutError):
            ours.send(call(seconds=0.5), much)
        assert time.thread_time() - before < 0.5


def test_a_link_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with links() as (ours, theirs):
        run_threads(
            [lambda: ours.send(call(), payload(9)), lambda: theirs.recv_into(call(), space(9))]
        )
    assert set(os.listdir("/proc/self/fd")) <= before
