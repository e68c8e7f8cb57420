"""A TCP link over several connections: frames striped over all of them, checked on the first."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.net.tcp_pairs import call, linked, sockets
from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport._link import Request, exchange, wait_all
from transport._operands.reduce_op import ReduceOp
from transport._tcp import TcpCommunicator
from transport._tcp.far import Distance, connections_from_environment, connections_to
from transport._tcp.frame import STEP_BYTES, pack_prefix
from transport._tcp.link import TcpLink
from transport._tcp.stripes import BLOCK_BYTES, STRIPED_BYTES, Stripes
from transport._waiting.deadline import Deadline

SIZES = (0, 5, STRIPED_BYTES - 1, STRIPED_BYTES, 3 * STRIPED_BYTES + 77, 4_000_001)


def payload(seed: int, size: int) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).data


def space(size: int) -> memoryview:
    return memoryview(bytearray(size))


@contextmanager
def wide(connections: int) -> Generator[tuple[TcpLink, TcpLink]]:
    """Links to rank 1, who made the connections, and from it."""
    with ExitStack() as stack:
        pairs = [stack.enter_context(sockets()) for _ in range(connections)]
        yield stack.enter_context(linked(*pairs[0], more=pairs[1:]))


@given(
    size=st.integers(1, 5 * BLOCK_BYTES),
    count=st.integers(2, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * BLOCK_BYTES)), max_size=30),
)
def test_every_byte_is_moved_once(size: int, count: int, steps: list[tuple[int, int]]) -> None:
    """``contiguous`` is where the first byte is missing, whatever moves how far."""
    ends: Any = list(range(count))
    data, moved = space(size), np.zeros(size, bool)
    places = np.frombuffer(data, np.uint8)
    stripes = Stripes(data, ends)

    def mark(view: memoryview, count: int) -> int:
        begin = np.frombuffer(view, np.uint8).ctypes.data - places.ctypes.data
        count = min(count, len(view))
        assert not moved[begin : begin + count].any()
        moved[begin : begin + count] = True
        return count

    def only(which: int, most: int) -> Any:
        def step(end: int, view: memoryview) -> int:
            if end != which:
                raise BlockingIOError
            return mark(view, most)

        return step

    for which, most in steps:
        stripes.move(only(which, most), STEP_BYTES)
        assert stripes.contiguous == (size if moved.all() else int(np.argmin(moved)))
    while stripes.left:
        assert stripes.move(lambda end, view: mark(view, len(view)), 100_000)
    assert moved.all()
    assert stripes.contiguous == size


def test_frames_go_over_all_connections() -> None:
    with wide(3) as (ours, theirs):
        assert len(ours.sockets) == len(theirs.sockets) == 3

        def side(link: TcpLink, mine: int) -> None:
            for turn in range(3):
                for size in SIZES:
                    into, progress = space(size), list[int]()
                    data = payload(mine + turn, size)
                    exchange(call(), link, data, link, into, progress.append)
                    assert into == payload(1 - mine + turn, size)
                    assert progress == sorted(progress)
                    assert progress[-1:] == ([size] if size else [])

        run_threads([lambda: side(ours, 0), lambda: side(theirs, 1)])

        for link in (ours, theirs):
            link.post_send(call(), payload(0, 600 * BLOCK_BYTES))
            assert len(link.leaving[0].waits_on) == 3


@pytest.mark.parametrize("at_once", [False, True])
def test_sends_over_several_connections(at_once: bool) -> None:
    with wide(4) as (ours, theirs):

        def send(link: TcpLink) -> None:
            one, sent = call(), list[Request]()
            for i, size in enumerate(SIZES):
                sent.append(link.post_send(one, payload(i, size)))
                if not at_once:
                    sent[-1].wait()
            wait_all(sent)

        def receive(link: TcpLink) -> None:
            for i, size in enumerate(SIZES):
                into = space(size)
                link.recv_into(call(), into)
                assert into == payload(i, size)

        run_threads([lambda: send(theirs), lambda: receive(ours)])
        run_threads([lambda: send(ours), lambda: receive(theirs)])


def test_a_frame_of_another_call_is_noticed_before_its_payload_lands() -> None:
    with wide(2) as (ours, theirs):
        into = space(STRIPED_BYTES)
        sender = threading.Thread(
            target=_send_in_vain, args=(theirs, payload(1, STRIPED_BYTES)), daemon=True
        )
        sender.start()
        with pytest.raises(HeaderMismatchError):
            ours.recv_into(call(1), into)
        assert into == space(STRIPED_BYTES)
        ours.abort()
        sender.join(LONG)


def test_a_payload_over_connections_that_there_are_not_is_no_hang() -> None:
    with wide(2) as (ours, theirs):
        ours.first.send(pack_prefix(call(), 1 << 20, connections=3))
        with pytest.raises(PeerLostError, match="3 connections, but the link has 2"):
            theirs.recv_into(call(), space(1 << 20))


def _send_in_vain(link: TcpLink, data: memoryview) -> None:
    with suppress(PeerLostError, CommunicatorAbortedError):
        link.send(call(2), data)


def test_deadlines_aborts_and_losses_know_all_connections() -> None:
    big = 40_000_000
    late = pytest.raises(CommunicatorTimeoutError, match="rank 0 read nothing")
    with wide(3) as (_, theirs), late:
        theirs.send(call(seconds=0.1), payload(1, big))
    with wide(3) as (ours, theirs):
        # The kernel's buffers hold a part of it. Nobody reads meanwhile, or it might all leave.
        theirs.post_send(call(), payload(1, big))
        theirs.abort("never mind")
        with pytest.raises(PeerLostError):
            ours.recv_into(call(), space(big))
    with wide(2) as (ours, theirs):
        descriptors = [sock.fileno() for link in (ours, theirs) for sock in (link.first,)]
        assert all(descriptor >= 0 for descriptor in descriptors)
        more: socket.socket = ours.sockets[1]
        ours.close()
        assert more.fileno() == ours.first.fileno() == -1


@pytest.fixture
def all_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport._tcp.far.is_on_this_machine", lambda _sock: False)
    monkeypatch.setattr("transport._tcp.far.round_trip_of", lambda _sock: 0.001)


@pytest.mark.usefixtures("all_far")
@pytest.mark.parametrize("tls", [False, True])
def test_links_to_far_peers_have_four_connections_at_both_ends(tls: bool) -> None:
    n, before = 3, set(threading.enumerate())

    def body(m: Member) -> set[int]:
        x = np.full(1_500_000, m.rank, np.float32)
        m.all_reduce(x, ReduceOp.SUM)
        assert (x == 3).all()
        comm: Any = m.comm
        return {len(link.sockets) for link in comm._links.values()}

    assert run_group(Transport("far", TcpCommunicator, tls=tls), n, body) == [{4}] * n
    deadline = Deadline.after(LONG)
    while set(threading.enumerate()) - before:
        assert not deadline.expired, set(threading.enumerate()) - before


@pytest.mark.parametrize(
    ("round_trip", "here", "connections", "window"),
    [
        (0.0009, False, 1, 0),
        (0.001, False, 3, 3 << 20),
        (0.050, False, 3, 3 << 20),
        (0.0, False, 1, 0),  # not known
        (0.001, True, 1, 0),
    ],
)
def test_the_round_trip_decides(
    monkeypatch: pytest.MonkeyPatch, round_trip: float, here: bool, connections: int, window: int
) -> None:
    monkeypatch.setattr("transport._tcp.far.is_on_this_machine", lambda _sock: here)
    monkeypatch.setattr("transport._tcp.far.round_trip_of", lambda _sock: round_trip)
    monkeypatch.setattr("transport._tcp.far._send_limit", lambda: 1 << 20)
    with sockets() as (ours, _):
        found = connections_to(ours, 3)
        assert (found, Distance(ours, "rank 1", found).window) == (connections, window)


def test_a_window_that_holds_a_link_back_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transport._tcp.far.is_on_this_machine", lambda _sock: False)
    monkeypatch.setattr("transport._tcp.far.round_trip_of", lambda _sock: 0.050)
    monkeypatch.setattr("transport._tcp.far._send_limit", lambda: 1 << 20)
    monkeypatch.setattr(Distance, "_warned", False)
    with sockets() as (ours, _):
        found = Distance(ours, "rank 1", 4)
    found.note_sent(8 << 20, 1.0)  # 0.4 MiB in a round trip, of 4: something else is slow
    found.note_sent(1 << 20, 0.01)  # which is in the kernel's memory at once
    assert not caplog.text
    for _ in range(2):
        found.note_sent(8 << 20, 0.1)
    (record,) = caplog.records
    assert "tcp_wmem and net.ipv4.tcp_rmem to 2097152" in record.getMessage()
    assert "rank 1" in record.getMessage()


@pytest.mark.parametrize(("value", "expected"), [(None, 4), ("", 4), ("1", 1), ("16", 16)])
def test_the_environment_sets_the_number_of_connections(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: int
) -> None:
    monkeypatch.delenv("MESHLIB_TCP_CONNECTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("MESHLIB_TCP_CONNECTIONS", value)
    assert connections_from_environment() == expected


@pytest.mark.parametrize("value", ["0", "17", "four", "-1"])
def test_a_wrong_number_of_connections(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("MESHLIB_TCP_CONNECTIONS", value)
    with pytest.raises(ValueError, match=f"MESHLIB_TCP_CONNECTIONS is '{value}'.*1 to 16"):
        connections_from_environment()
