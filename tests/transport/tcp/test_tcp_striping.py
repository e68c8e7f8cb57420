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
from hypothesis import example, given
from hypothesis import strategies as st
from rank_threads import LONG, Member, Transport, run_group, run_threads
from tcp_pairs import call, linked, sockets

from transport.call import Call, Kind
from transport.deadline import Deadline
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport.operands.reduce_op import ReduceOp
from transport.tcp import frame
from transport.tcp.deal import BLOCK_BYTES, STRIPED_BYTES, Deal, runs_of, shares_of
from transport.tcp.frame import STEP_BYTES, Terms
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


@given(blocks=st.integers(1, 600), shares=st.binary(min_size=2, max_size=16).filter(any))
def test_every_block_is_dealt_once_in_the_shares_and_evenly(blocks: int, shares: bytes) -> None:
    runs = runs_of(blocks, shares)
    owners = sorted((begin, end, i) for i, own in enumerate(runs) for begin, end in own)
    assert [0, *(end for _, end, _ in owners)] == [*(begin for begin, _, _ in owners), blocks]
    for i, own in enumerate(runs):
        assert own == sorted(own)
        count, fair = sum(end - begin for begin, end in own), blocks * shares[i] / sum(shares)
        assert abs(count - fair) < 1 + 1e-9
        early = sum(min(end, blocks // 2) - begin for begin, end in own if begin < blocks // 2)
        assert abs(early - count / 2) <= 1 + len(shares)


@example(rooms=[1] * 16, nbytes=1 << 18)
@given(
    rooms=st.lists(st.integers(1, 1 << 30), min_size=2, max_size=16), nbytes=st.integers(1 << 18)
)
def test_shares_are_what_connections_have_room_for(rooms: list[int], nbytes: int) -> None:
    shares = shares_of(rooms, nbytes)
    assert len(shares) == len(rooms)
    dealt = sum(room for room, share in zip(rooms, shares, strict=True) if share)
    for room, share in zip(rooms, shares, strict=True):
        if share:
            assert share - 1 < 255 * room / max(rooms) <= share
            assert 2 * room * nbytes >= dealt * BLOCK_BYTES  # half a block
        else:
            assert 2 * room * nbytes < (dealt + room) * BLOCK_BYTES
    assert 255 in shares


@given(
    size=st.integers(1, 5 * BLOCK_BYTES),
    shares=st.binary(min_size=2, max_size=4).filter(any),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * BLOCK_BYTES)), max_size=30),
)
def test_every_byte_is_moved_once(size: int, shares: bytes, steps: list[tuple[int, int]]) -> None:
    """``contiguous`` is where the first byte is missing, whatever moves how far."""
    ends: Any = list(range(len(shares)))
    data, moved = space(size), np.zeros(size, bool)
    places = np.frombuffer(data, np.uint8)
    deal = Deal(data, ends, shares)

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
        deal.move(only(which, most), STEP_BYTES)
        assert deal.contiguous == (size if moved.all() else int(np.argmin(moved)))
    while deal.left:
        assert deal.move(lambda end, view: mark(view, len(view)), 100_000)
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
            outgoing = link.departure(call(), payload(0, 60 * BLOCK_BYTES))
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
        with sockets() as (one_more, _):
            acceptor.add(one_more, known=False)  # the maker has not heard of it
            outgoing = acceptor.departure(call(), payload(3, 60 * BLOCK_BYTES))
            acceptor.push(outgoing)  # the prefix
            assert len(outgoing.waits_on(acceptor.first)) == 2


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


def test_a_payload_dealt_to_connections_that_there_are_not_is_no_hang() -> None:
    with wide(2) as (ours, theirs):
        terms = Terms(3, 255, bytes([1, 1, 1]))
        ours.first.send(call().packed + frame._LENGTH.pack(1 << 20, *terms))
        with pytest.raises(PeerLostError, match="3 connections of 2"):
            theirs.recv_into(call(), space(1 << 20))


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
    """One rank's links want as many connections as the test says: to some peers it makes them, of
    others it asks for them.
    """

    def link(self, peer: int, call: Call) -> TcpLink:
        link = super().link(peer, call)
        link._on_this_machine = False  # pyright: ignore[reportPrivateUsage]
        return link


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("wanting", [0, 1, 2])
def test_a_link_has_as_many_connections_as_one_end_wants(tls: bool, wanting: int) -> None:
    n, before = 3, set(threading.enumerate())
    gate = threading.Barrier(n, timeout=LONG)

    def body(m: Member) -> int:
        comm: Any = m.comm
        for wanted in (1, 2, 4, 4):
            if m.rank == wanting:
                for link in comm._links.values():
                    link._width.wanted = wanted
            gate.wait()
            x = np.full(1_500_000, m.rank, np.float32)
            m.all_reduce(x, ReduceOp.SUM)
            assert (x == 3).all()
            deadline = Deadline.after(LONG)
            links = comm._links
            links = links.values() if m.rank == wanting else [links[wanting]]
            while not all(link.connections == wanted for link in links):
                assert not deadline.expired
                time.sleep(0.001)
            gate.wait()
        return min(link.connections for link in links)

    assert run_group(Transport("widening", Widening, tls=tls), n, body) == [4] * n
    deadline = Deadline.after(LONG)
    while set(threading.enumerate()) - before:
        assert not deadline.expired, set(threading.enumerate()) - before


def test_who_only_receives_makes_the_connections_that_the_sender_wants() -> None:
    def body(m: Member) -> int:
        comm: Any = m.comm
        for wanted in (1, 2):
            x = np.full(500_000, m.rank, np.float32)
            if m.rank == 0 and wanted > 1:
                comm._links[1]._width.wanted = wanted
            m.comm.broadcast(m.call(Kind.BROADCAST, x.dtype, x.size, root=0), x, 0)
            assert (x == 0).all()
            deadline = Deadline.after(LONG)
            while comm._links[1 - m.rank].connections < wanted:
                assert not deadline.expired
                time.sleep(0.001)
        return comm._links[1 - m.rank].connections

    assert run_group(Transport("widening", Widening), 2, body) == [2, 2]
