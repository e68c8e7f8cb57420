"""A TCP link over several connections: frames dealt to all of them, checked on the first."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from far_links import FarTcpCommunicator
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import LONG, Member, Transport, run_group, run_threads
from tcp_pairs import call, linked, sockets

from transport.deadline import Deadline
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport.link import Pace
from transport.operands.reduce_op import ReduceOp
from transport.tcp.frame import BLOCK_BYTES, STRIPED_BYTES, Deal
from transport.tcp.link import TcpLink

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
        links = stack.enter_context(linked(*pairs[0]))
        for ours, theirs in pairs[1:]:
            links[0].add(ours, known=False)
            links[1].add(theirs, known=True)
        yield links


@given(
    size=st.integers(1, 5 * BLOCK_BYTES),
    n=st.integers(2, 4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * BLOCK_BYTES)), max_size=30),
)
def test_every_byte_is_dealt_once(size: int, n: int, steps: list[tuple[int, int]]) -> None:
    """``contiguous`` is where the first byte is missing, whatever moves how far."""
    ends: Any = list(range(n))
    data, moved = space(size), np.zeros(size, bool)
    places = np.frombuffer(data, np.uint8)
    deal = Deal(data, ends)

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
        deal.move(only(which, most))
        assert deal.contiguous == (size if moved.all() else int(np.argmin(moved)))
    while deal.left:
        assert deal.move(lambda end, view: mark(view, len(view)))
    assert moved.all()
    assert deal.contiguous == size


def test_frames_go_over_all_connections_as_soon_as_both_ends_know_of_them() -> None:
    with wide(3) as (ours, theirs):
        assert ours.connections == theirs.connections == 3

        def side(link: TcpLink, mine: int) -> None:
            for turn in range(3):
                for size in SIZES:
                    into, told = space(size), list[int]()
                    data = payload(mine + turn, size)
                    link.exchange(call(), data, link, into, told.append)
                    assert into == payload(1 - mine + turn, size)
                    assert told == sorted(told)
                    assert told[-1:] == ([size] if size else [])

        run_threads([lambda: side(ours, 0), lambda: side(theirs, 1)])

        for link in (ours, theirs):
            outgoing = link.departure(call(), payload(0, 3 * BLOCK_BYTES))
            link.push(outgoing)  # the prefix, on the first
            assert len(outgoing.waits_on(link.first)) == 3


def test_an_acceptor_waits_until_the_other_end_knows() -> None:
    with wide(2) as (acceptor, maker):
        big = payload(1, STRIPED_BYTES)
        assert acceptor.departure(call(), big).waits_on(acceptor.first) == (acceptor.first,)
        run_threads(
            [
                lambda: maker.send(call(), payload(2, 3)),
                lambda: acceptor.recv_into(call(), space(3)),
            ]
        )
        outgoing = acceptor.departure(call(), big)
        while not outgoing.done:
            if not acceptor.push(outgoing):
                maker.pull(maker.arrival(call(), space(STRIPED_BYTES)), 0)
        assert not outgoing.waits_on(acceptor.first)


@pytest.mark.parametrize("way", ["send", "outbox"])
def test_sends_and_outboxes_over_several_connections(way: str) -> None:
    with wide(4) as (ours, theirs):

        def send(link: TcpLink) -> None:
            if way == "send":
                for i, size in enumerate(SIZES):
                    link.send(call(), payload(i, size))
                return
            with link.outbox(call()) as outbox:
                for i, size in enumerate(SIZES):
                    outbox.post(link, payload(i, size))

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


def _send_in_vain(link: TcpLink, data: memoryview) -> None:
    with suppress(PeerLostError, CommunicatorAbortedError):
        link.send(call(2), data)


def test_deadlines_aborts_and_losses_know_all_connections() -> None:
    big = 40_000_000
    late = pytest.raises(CommunicatorTimeoutError, match="rank 0 took nothing")
    with wide(3) as (_, theirs), late:
        theirs.send(call(seconds=0.1), payload(1, big))
    with wide(3) as (ours, theirs):

        def lose() -> None:
            with pytest.raises(PeerLostError):
                ours.recv_into(call(), space(big))

        def leave() -> None:
            outgoing = theirs.departure(call(), payload(1, big))
            theirs.push(outgoing)
            theirs.push(outgoing)
            theirs.abort("never mind")

        run_threads([lose, leave])
    with wide(2) as (ours, theirs):
        descriptors = [sock.fileno() for link in (ours, theirs) for sock in (link.first,)]
        assert all(descriptor >= 0 for descriptor in descriptors)
        more: socket.socket = ours._more[0]  # pyright: ignore[reportPrivateUsage]
        ours.close()
        assert more.fileno() == ours.first.fileno() == -1


class Widening(FarTcpCommunicator):
    """Rank 1 finds its links held back, however many connections they have."""

    def _pace(self) -> Pace:
        connections = max((link.connections for link in self._links.values()), default=1)
        return Pace(0.01, 1e8, connections, 0.9 if self.rank == 1 else 0.0)


@pytest.mark.parametrize("tls", [False, True])
def test_members_make_as_many_connections_as_one_of_them_needs(tls: bool) -> None:
    n, before = 3, set(threading.enumerate())
    gate = threading.Barrier(n, timeout=LONG)

    def body(m: Member) -> int:
        comm: Any = m.comm
        for wanted in (2, 4, 4):
            x = np.full(1_500_000, m.rank, np.float32)
            m.all_reduce(x, ReduceOp.SUM)
            assert (x == 3).all()
            deadline = Deadline.after(LONG)
            while not all(link.connections >= wanted for link in comm._links.values()):
                assert not deadline.expired
                time.sleep(0.001)
            gate.wait()
        return min(link.connections for link in comm._links.values())

    assert run_group(Transport("widening", Widening, tls=tls), n, body) == [4] * n
    deadline = Deadline.after(LONG)
    while set(threading.enumerate()) - before:
        assert not deadline.expired, set(threading.enumerate()) - before
