"""Connected pairs for the tests of the TCP transport."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transport._calls.call import Call
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._net.tls import TlsSocket
from transport._tcp.link import FrameWorker, TcpLink
from transport._waiting.deadline import Deadline

LONG = 60.0


def call(sequence: int = 1, seconds: float = LONG, kind: Kind = Kind.ALL_REDUCE) -> Call:
    return Call(CallHeader(sequence, 4, NO_ROOT, kind, 11, 1), Deadline.after(seconds))


@contextmanager
def sockets(host: str = "127.0.0.1") -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        ours = socket.create_connection(listener.getsockname()[:2])
        theirs, _ = listener.accept()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield ours, theirs


@contextmanager
def linked(
    ours: socket.socket | TlsSocket,
    theirs: socket.socket | TlsSocket,
    workers: tuple[FrameWorker | None, FrameWorker | None] = (None, None),
    more: Sequence[tuple[socket.socket, socket.socket]] = (),
) -> Iterator[tuple[TcpLink, TcpLink]]:
    """Links over two connected sockets, plain or TLS, and ``more``; closed in the end. The links of
    one rank share a worker.
    """
    here, there = (ours, *(a for a, _ in more)), (theirs, *(b for _, b in more))
    pair = TcpLink(here, 1, "rank 1", workers[0]), TcpLink(there, 0, "rank 0", workers[1])
    try:
        yield pair
    finally:
        for link in pair:
            link.close()


@contextmanager
def links(
    host: str = "127.0.0.1",
    workers: tuple[FrameWorker | None, FrameWorker | None] = (None, None),
) -> Iterator[tuple[TcpLink, TcpLink]]:
    """A link to rank 1 (as seen from rank 0), and the one to rank 0."""
    with sockets(host) as (ours, theirs), linked(ours, theirs, workers) as pair:
        yield pair
