"""A frame that is passed on from one TCP link to another while it comes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from rank_threads import LONG, run_threads
from tcp_pairs import call, linked, links, sockets

from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport.tcp.frame import (
    PREFIX_BYTES,
    SMALL_BYTES,
    Outgoing,
    PassedOn,
)
from transport.tcp.link import TcpLink
from transport.tcp.stripes import STRIPED_BYTES

LARGE = 5_000_001
SIZES = (0, 5, SMALL_BYTES, SMALL_BYTES + 1, STRIPED_BYTES, LARGE)


def payload(size: int = LARGE) -> memoryview:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).data


def space(size: int = LARGE) -> memoryview:
    return memoryview(bytearray(size))


def prefix(data: memoryview) -> bytes:
    """Return the first bytes of the frame of ``data``, of more than ``SMALL_BYTES``."""
    return Outgoing(call(), data)._head


@contextmanager
def wide(connections: int) -> Generator[tuple[TcpLink, TcpLink]]:
    """Two ends of a link over so many connections."""
    with ExitStack() as stack:
        pairs = [stack.enter_context(sockets()) for _ in range(connections)]
        ends = stack.enter_context(linked(*pairs[0]))
        for ours, theirs in pairs[1:]:
            ends[1].add(theirs, dialled=False)
            ends[0].add(ours, dialled=True)
        yield ends


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("connections", [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_what_comes_is_kept_and_passed_on(connections: tuple[int, int], size: int) -> None:
    with wide(connections[0]) as (root, source), wide(connections[1]) as (onward, last):
        kept, got = ([space(size) for _ in range(2)] for _ in range(2))

        def send() -> None:
            for _ in range(2):
                root.send(call(), payload(size))

        def relay() -> None:
            for into in kept:
                onward.relay(call(), source, into)

        def receive() -> None:
            for into in got:
                last.recv_into(call(), into)

        run_threads([send, relay, receive])
        assert kept == got == [payload(size)] * 2


def test_the_beginning_is_passed_on_before_the_end_has_come() -> None:
    data, into, begun = payload(), space(), threading.Event()
    with links() as (root, source), links() as (onward, last):

        def send() -> None:
            root.first.sendall(prefix(data) + data[:100_000])
            assert begun.wait(LONG)
            root.first.sendall(data[100_000:])

        def receive() -> None:
            found = space(PREFIX_BYTES + LARGE)
            at = 0
            while at < len(found):
                at += last.first.recv_into(found[at:])
                if at >= PREFIX_BYTES + 100_000:
                    begun.set()
            assert found == prefix(data) + data

        run_threads([send, lambda: onward.relay(call(), source, into), receive])
        assert into == data


def test_a_frame_of_another_call_is_not_passed_on() -> None:
    with links() as (root, source), links() as (onward, last):
        into = space()
        sender = threading.Thread(target=_send_in_vain, args=(root,))
        sender.start()
        with pytest.raises(HeaderMismatchError):
            onward.relay(call(), source, into)
        source.abort()
        sender.join(LONG)
        assert not any(into[:1000])
        onward.send(call(3), memoryview(b"123"))  # nothing of the frame came before it
        small = space(3)
        last.recv_into(call(3), small)
        assert small == b"123"


def _send_in_vain(link: TcpLink) -> None:
    with pytest.raises(PeerLostError):
        link.send(call(2), payload())


def test_who_has_half_of_a_frame_gets_no_more_when_its_origin_is_lost() -> None:
    data = payload()
    with links() as (root, source), links() as (onward, last):
        source.peer = 7

        def relay() -> None:
            with pytest.raises(PeerLostError) as raised:
                onward.relay(call(), source, space())
            assert raised.value.peer == 7
            with pytest.raises(CommunicatorAbortedError, match="middle of a frame"):
                onward.send(call(), memoryview(b""))

        def lose() -> None:
            root.first.sendall(prefix(data) + data[:100_000])
            root.close()

        def receive() -> None:
            with pytest.raises(PeerLostError):
                last.recv_into(call(), space())

        run_threads([lose, relay, receive])


@pytest.mark.parametrize("silent", ["the one before", "the one behind"])
def test_past_the_deadline_the_peer_is_named_that_is_waited_for(silent: str) -> None:
    with links() as (root, source), links() as (onward, _last):
        source.peer, onward.peer = 7, 8
        late, sender = call(seconds=0.3), None
        if silent == "the one behind":
            sender = threading.Thread(target=root.send, args=(call(), payload()))
            sender.start()
        with pytest.raises(CommunicatorTimeoutError) as raised:
            onward.relay(late, source, space())
        assert raised.value.peer == (8 if sender else 7)
        if sender is not None:
            sender.join(LONG)


@pytest.mark.parametrize("size", [0, 5])
def test_a_frame_is_not_done_before_all_of_its_head_is_sent(size: int) -> None:
    class Full(socket.socket):
        def sendmsg(self, buffers: Any, *_: Any) -> int:
            return self.send(b"".join(buffers)[:10])

        def send(self, data: Any, *_: Any) -> int:
            found.extend(data[:10])
            return min(len(data), 10)

    found = bytearray()
    with Full() as sock:
        frame = PassedOn(call(), payload(size))
        frame.there = size
        while not frame.done:
            frame.push(sock)
    assert len(found) == PREFIX_BYTES + size
