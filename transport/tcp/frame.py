"""Frames on a TCP connection: the call's header, the payload's length, the payload.

A small frame is put together in memory and moved in one piece. A large one goes from and to the
arrays' own memory; its prefix is read and checked before a byte of it lands there. Where a link has
several connections, all prefixes are on the first, and say over how many the payload is striped.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable, Sequence

from transport.call import HEADER_BYTES, Call, CallHeader
from transport.tcp.stripes import Stripes

# Padded to a whole cache line. Of 40 bytes, an array's bytes would lie in the kernel's pages a few
# bytes behind where they lie in ours, for which some processors' copy instruction is twice as slow.
# Behind the length: over how many connections the payload comes.
_LENGTH = struct.Struct("<QB23x")
_CHECKED_BYTES = HEADER_BYTES + 8
PREFIX_BYTES = HEADER_BYTES + _LENGTH.size

SMALL_BYTES = 16 << 10
"""Payloads up to here are copied once more, to save a system call."""

STAGING_BYTES = PREFIX_BYTES + SMALL_BYTES
"""The memory that receiving needs beside the arrays."""

# Plain numbers: Python's flags take a microsecond each time they are combined.
NOW = int(socket.MSG_DONTWAIT) | int(socket.MSG_NOSIGNAL)
"""Flags of a send or recv that does what it can at once, and raises BlockingIOError else."""

ALL = int(socket.MSG_WAITALL)
"""The flag of a recv that waits for all that it has room for."""

STEP_BYTES = 1 << 20
"""The most that is moved one way before the other way gets its turn."""


def parse_prefix(prefix: bytes | bytearray | memoryview) -> tuple[CallHeader, int]:
    """Return the header and the payload's length from a frame's first ``PREFIX_BYTES`` bytes."""
    return CallHeader.unpack(prefix), _LENGTH.unpack_from(prefix, HEADER_BYTES)[0]


class WrongFrame(Exception):
    """What arrived is not the frame that was expected: its header and its payload's length."""

    def __init__(self, header: CallHeader, size: int) -> None:
        super().__init__(header, size)
        self.header = header
        self.size = size


class Outgoing:
    """A frame on its way into a socket: ``done`` when it has all of it."""

    __slots__ = ("_head", "_rest", "begun", "done")

    def __init__(self, call: Call, data: memoryview, connections: int = 1) -> None:
        size = data.nbytes
        prefix = call.packed + _LENGTH.pack(size, connections)
        if size <= SMALL_BYTES:
            self._head = b""
            self._rest: bytes | memoryview = prefix + data
        else:
            self._head = prefix
            self._rest = data
        self.begun = False
        self.done = False

    def push(self, sock: socket.socket) -> None:
        """Send what fits at once, ``sock`` being the first connection; raise BlockingIOError when
        nothing does.
        """
        rest = self._rest
        if self._head:
            sent = sock.sendmsg((self._head, rest[:STEP_BYTES]), (), NOW)
            from_head = min(sent, len(self._head))
            self._head = self._head[from_head:]
            sent -= from_head
        elif len(rest) <= STEP_BYTES:
            sent = sock.send(rest, NOW)
        else:
            sent = sock.send(rest[:STEP_BYTES], NOW)
        self.begun = True
        if sent == len(rest):
            self.done = True
        else:
            self._rest = memoryview(rest)[sent:]

    def waits_on(self, sock: socket.socket) -> Sequence[socket.socket]:
        """Return the sockets that have to take more; ``sock`` is the first connection."""
        return (sock,)


class PassedOn(Outgoing):
    """A frame of which only the first ``there`` bytes are there by now: it leaves while it
    comes.
    """

    __slots__ = ("_at", "_data", "there")

    def __init__(self, call: Call, data: memoryview, connections: int = 1) -> None:
        super().__init__(call, data, connections)
        self._head = call.packed + _LENGTH.pack(data.nbytes, connections)
        self._data = data
        self._at = 0
        self.there = 0

    @property
    def waits(self) -> bool:
        """Whether there is something that the socket has not taken."""
        return self._at < self.there

    def push(self, sock: socket.socket) -> None:
        piece = self._data[self._at : min(self.there, self._at + STEP_BYTES)]
        if self._head:
            sent = sock.sendmsg((self._head, piece), (), NOW)
            from_head = min(sent, len(self._head))
            self._head = self._head[from_head:]
            sent -= from_head
        elif piece:
            sent = sock.send(piece, NOW)
        else:
            raise BlockingIOError
        self.begun = True
        self._at += sent
        self.done = not self._head and self._at == len(self._data)


class StripedOutgoing(PassedOn):
    """A ``PassedOn`` whose payload, a large one, is striped over several connections."""

    __slots__ = ("_began", "_stripes")

    def __init__(self, call: Call, data: memoryview, connections: Sequence[socket.socket]) -> None:
        super().__init__(call, data, len(connections))
        self._stripes = Stripes(data, connections)
        self._began = 0.0

    @property
    def waits(self) -> bool:
        self._stripes.there = self.there
        return self.there > 0 and bool(self._head or self._stripes.left)

    @property
    def took(self) -> float:
        """The seconds since the first of it left."""
        return time.monotonic() - self._began

    def push(self, sock: socket.socket) -> None:
        self._stripes.there = self.there
        if self._head:
            self._head = self._head[sock.send(self._head, NOW) :]
            self.begun = True
            self._began = time.monotonic()
        elif not self._stripes.move(_send, STEP_BYTES):
            raise BlockingIOError
        self.done = self._stripes.contiguous == len(self._data)

    def waits_on(self, sock: socket.socket) -> Sequence[socket.socket]:
        return (sock,) if self._head else self._stripes.left


def _send(sock: socket.socket, data: memoryview) -> int:
    return sock.send(data, NOW)


def _receive(sock: socket.socket, into: memoryview) -> int:
    count = sock.recv_into(into, len(into), NOW)
    if count == 0:
        raise ConnectionResetError(errno.ECONNRESET, "it hung up")
    return count


class Incoming:
    """The frame that ``call`` waits for, on its way from a socket ``into`` memory.

    ``staging`` is ``STAGING_BYTES`` of memory. ``received`` counts the payload's bytes in
    ``into``: all at once for a small frame, rising for a large one. ``connections`` is given
    the number in the prefix, and returns the sockets over which the payload comes.
    """

    __slots__ = (
        "_connections",
        "_expected",
        "_in_place",
        "_rest",
        "_staged",
        "_staging",
        "_stripes",
        "call",
        "done",
        "into",
        "received",
    )

    def __init__(
        self,
        call: Call,
        into: memoryview,
        staging: memoryview,
        connections: Callable[[int], Sequence[socket.socket]],
    ) -> None:
        size = into.nbytes
        self.call = call
        self.into = into
        self._expected = call.packed + _LENGTH.pack(size, 1)
        self._connections = connections
        self._stripes: Stripes | None = None
        self._staging = staging
        self._rest = staging[: PREFIX_BYTES + size if size <= SMALL_BYTES else PREFIX_BYTES]
        self._staged = 0
        self._in_place = False
        self.received = 0
        self.done = False

    @property
    def striped(self) -> bool:
        """Whether the payload is known to come over several connections."""
        return self._stripes is not None

    def waits_on(self, sock: socket.socket) -> Sequence[socket.socket]:
        """Return the sockets that have to bring more; ``sock`` is the first connection."""
        return (sock,) if self._stripes is None else self._stripes.left

    @property
    def begun(self) -> bool:
        """Whether a part of the frame has been taken from the socket."""
        return self._staged > 0

    def pull(self, sock: socket.socket, flags: int, limit: int = 0) -> None:
        """Receive once, with the ``flags`` of recv and at most ``limit`` bytes (0: no limit).

        Raises BlockingIOError when there was nothing, ConnectionResetError at the end of the
        stream, WrongFrame when the frame is not the one that the call waits for. A striped payload
        is never waited for.
        """
        if self._stripes is not None:
            if not self._stripes.move(_receive, limit or STEP_BYTES):
                raise BlockingIOError
            self.received = self._stripes.contiguous
            self.done = self.received == len(self.into)
            return
        if not self._in_place:
            # Were the frame another one, shorter than ours, waiting for all of ours would hang.
            flags &= ~ALL
        rest = self._rest
        count = sock.recv_into(rest, min(limit, len(rest)), flags)
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        left = len(rest) - count
        self._rest = rest[count:]
        if self._in_place:
            self.received += count
            self.done = not left
            return
        self._staged += count
        if self._staged >= PREFIX_BYTES:
            if bytes(self._staging[:PREFIX_BYTES]) != self._expected and self._is_striped():
                return
            if len(self.into) > SMALL_BYTES:
                self._rest = self.into
                self._in_place = True
            elif not left:
                self.into[:] = self._staging[PREFIX_BYTES : self._staged]
                self.received = len(self.into)
                self.done = True

    def _is_striped(self) -> bool:
        """Look at a prefix that is not that of a payload on one connection; begin with the others
        if it says so.
        """
        if bytes(self._staging[:_CHECKED_BYTES]) != self._expected[:_CHECKED_BYTES]:
            raise WrongFrame(*parse_prefix(self._staging))
        over = self._connections(_LENGTH.unpack_from(self._staging, HEADER_BYTES)[1])
        if len(over) > 1:
            self._stripes = Stripes(self.into, over)
        return self._stripes is not None
