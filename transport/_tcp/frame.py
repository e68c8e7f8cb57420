"""Frames on a TCP connection: the call's header, the payload's length and tag, the payload.

A small frame is assembled in memory and moved in one piece. A large payload is sent from and
received into the arrays' memory, after the receiver has checked the frame's prefix. On a link with
several connections, all prefixes are on the first one, and contain the number of connections over
which the payload is striped.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transport._calls.call import Call
from transport._calls.header import HEADER_BYTES, CallHeader
from transport._link import OnPiece, Request
from transport._platform import SEND_NOW as NOW
from transport._tcp.stripes import Stripes

# The length, the number of connections that carry the payload, the tag; padded to a whole cache
# line. Otherwise the payload's alignment in the kernel's pages would differ from the array's, and
# some processors then copy at half the speed.
_LENGTH = struct.Struct("<QB3xI16x")
PREFIX_BYTES = HEADER_BYTES + _LENGTH.size

SMALL_BYTES = 16 << 10
"""Payloads up to this size are copied once more, to save a system call."""

STAGING_BYTES = PREFIX_BYTES + SMALL_BYTES
"""The size of a connection's receive buffer."""

ALL = int(socket.MSG_WAITALL)
"""The flag of a recv that waits until the buffer is full."""

STEP_BYTES = 1 << 20
"""The most bytes that are moved in one direction before the other direction's turn."""


class Prefix(NamedTuple):
    """The first ``PREFIX_BYTES`` bytes of a frame."""

    packed: bytes
    size: int
    connections: int
    tag: int

    @property
    def header(self) -> CallHeader:
        """The call's header."""
        return CallHeader.unpack(self.packed)


def parse_prefix(data: bytes | bytearray | memoryview) -> Prefix:
    """Parse the first bytes of a frame."""
    return Prefix(bytes(data[:HEADER_BYTES]), *_LENGTH.unpack_from(data, HEADER_BYTES))


def pack_prefix(call: Call, size: int, tag: int = 0, connections: int = 1) -> bytes:
    """Return the prefix of a frame of ``size`` bytes."""
    return call.packed + _LENGTH.pack(size, connections, tag)


class FrameConnection(Protocol):
    """A connection, as its frames use it."""

    def wait(self, request: FrameSend | FrameReceive, on_piece: OnPiece | None = None) -> None:
        """Make progress until ``request``, which was posted here, is done."""
        ...


class FrameSend(Request):
    """An outgoing frame on ``link``, over ``connections``, the first of which carries the prefix.

    It is done, and releases its memory, when the kernel has accepted all of it.
    """

    __slots__ = (
        "_began",
        "_connections",
        "_head",
        "_rest",
        "_stripes",
        "begun",
        "call",
        "link",
        "nbytes",
    )

    def __init__(
        self,
        link: FrameConnection,
        call: Call,
        data: memoryview,
        tag: int,
        connections: Sequence[socket.socket],
    ) -> None:
        self.link = link
        self.call = call
        self.nbytes = size = data.nbytes
        self._connections = connections
        self._stripes = Stripes(data, connections) if len(connections) > 1 else None
        prefix = pack_prefix(call, size, tag, len(connections))
        if size <= SMALL_BYTES:
            self._head = b""
            self._rest: bytes | memoryview = prefix + data
        else:
            self._head = prefix
            self._rest = data
        self._began = 0.0
        self.begun = self.done = False

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self.link.wait(self)

    @property
    def took(self) -> float:
        """The seconds since the first byte was sent."""
        return time.monotonic() - self._began

    @property
    def waits_on(self) -> Sequence[socket.socket]:
        """The connections that have bytes left to send."""
        if self._stripes is None or self._head:
            return self._connections[:1]
        return self._stripes.left

    def skip(self, sent: int) -> None:
        """Record that the first ``sent`` bytes of a small frame were sent."""
        self.begun = True
        self._take(sent)

    def push(self) -> None:
        """Send as much as fits at once; raise BlockingIOError if nothing does."""
        sock, rest, stripes = self._connections[0], self._rest, self._stripes
        if stripes is not None and not self._head:
            if not stripes.move(_send, STEP_BYTES):
                raise BlockingIOError
            self.done = stripes.contiguous == self.nbytes
        elif self._head:
            pieces = (self._head,) if stripes is not None else (self._head, rest[:STEP_BYTES])
            sent = sock.sendmsg(pieces, (), NOW)
            from_head = min(sent, len(self._head))
            self._head = self._head[from_head:]
            self._take(sent - from_head)
        else:
            self._take(sock.send(rest if len(rest) <= STEP_BYTES else rest[:STEP_BYTES], NOW))
        if not self.begun:
            self.begun = True
            self._began = time.monotonic()
        if self.done:
            self._rest, self._stripes = b"", None

    def _take(self, sent: int) -> None:
        if sent == len(self._rest):
            self.done = True
        elif sent:
            self._rest = memoryview(self._rest)[sent:]


class _CompletedSend(Request):
    """A frame that was sent at once."""

    __slots__ = ()

    def __init__(self) -> None:
        self.done = True

    def wait(self, on_piece: OnPiece | None = None) -> None:
        pass


SENT = _CompletedSend()
"""The request of every small frame that was sent at once."""


class FrameReceive(Request):
    """A posted receive of a frame on ``link``: ``received`` of its bytes are in ``into``."""

    __slots__ = ("call", "into", "link", "prefix", "received", "tag")

    def __init__(self, link: FrameConnection, call: Call, into: memoryview, tag: int) -> None:
        self.link = link
        self.call = call
        self.into = into
        self.tag = tag
        self.prefix = pack_prefix(call, into.nbytes, tag)
        self.received = 0
        self.done = False

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self.link.wait(self, on_piece)
        elif on_piece is not None and self.received:
            on_piece(self.received)


def _send(sock: socket.socket, data: memoryview) -> int:
    return sock.send(data, NOW)


def receive(sock: socket.socket, into: memoryview, flags: int = NOW, limit: int = 0) -> int:
    """Receive once, with the ``flags`` of recv and at most ``limit`` bytes (0: no limit).

    Raises BlockingIOError if no bytes have arrived, ConnectionResetError at the end of the stream.
    """
    count = sock.recv_into(into, min(limit, len(into)), flags)
    if count == 0:
        raise ConnectionResetError(errno.ECONNRESET, "it hung up")
    return count
