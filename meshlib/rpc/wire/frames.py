"""Frames: what goes over a connection. Whatever bytes come, they are frames or ``FrameError``.

A frame is a header of 24 bytes (kind, flags, the number of buffers, a call's number, the size of
its data), a table of 16 bytes a buffer (size, address), the data, and the buffers. A buffer with an
address does not follow: it lies in the sender's memory, and the receiver fetches it there.
"""

from __future__ import annotations

import enum
import errno
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transport.errors import DistNetworkError

_HEADER = struct.Struct("<BBHIQQ")
HEADER_BYTES = _HEADER.size
_ENTRY = struct.Struct("<QQ")
STAGE_BYTES = 128 << 10
"""What is received at once. Pieces of more than half of it are received where they are to stay."""
_DIRECT = STAGE_BYTES // 2
_MAX_BUFFERS = 1 << 20
_MAX_BYTES = 1 << 44


class FrameError(DistNetworkError):
    """What came is no frame: the connection cannot be used any more."""


class Kind(enum.IntEnum):
    """What a frame is."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    NOTICE = 4
    """About references; ``call`` is its number on the way from this worker to that one."""
    ASK = 5
    """A question to the worker itself, which no program of the user's answers."""
    TAKEN = 6
    """The buffers in the sender's memory that belong to this call have been fetched."""
    CANCEL = 7
    """Nobody waits for this call any more."""
    HELLO = 8
    """Who connects, and what of its memory may be fetched; the answer to that; its answer."""


_KINDS = frozenset(map(int, Kind))


class Buffer(NamedTuple):
    """A buffer that came with a frame, or that has to be fetched: ``memory`` is None then."""

    nbytes: int
    address: int
    memory: memoryview | None


class Frame(NamedTuple):
    """One message as it came."""

    kind: int
    flags: int
    call: int
    data: bytes | memoryview
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return len(self.data) + sum(b.nbytes for b in self.buffers if b.memory is not None)


def pack(
    kind: int,
    call: int,
    data: bytes,
    buffers: Sequence[memoryview] = (),
    addresses: Sequence[int] = (),
    flags: int = 0,
) -> list[bytes | memoryview]:
    """Return the pieces of a frame, in the order in which they travel.

    ``addresses`` has, for each of ``buffers``, where it lies, or 0: it travels.
    """
    header = _HEADER.pack(kind, flags, 0, len(buffers), call, len(data))
    if not buffers:
        return [header + data]
    table = b"".join(
        _ENTRY.pack(buffer.nbytes, address)
        for buffer, address in zip(buffers, addresses, strict=True)
    )
    inline = [b for b, address in zip(buffers, addresses, strict=True) if not address and b.nbytes]
    return [header + table + data, *inline]


class FrameReader:
    """Makes frames of what a socket receives. One thread at a time."""

    def __init__(self) -> None:
        self._memory = bytearray(STAGE_BYTES)
        self._stage = memoryview(self._memory)
        self._begin = self._end = 0
        # Of a frame that has begun: its header, the sizes of its pieces, and those that are here.
        self._header: tuple[int, int, int, int] | None = None
        self._addresses: list[tuple[int, int]] = []
        self._pieces: list[memoryview] = []
        # A large piece: the whole, and the rest that has not come.
        self._whole: memoryview | None = None
        self._rest: memoryview | None = None
        self._filled = False

    @property
    def may_have_more(self) -> bool:
        """Whether the last receive left no room: more may be there that no poll tells of."""
        return self._filled or self._rest is not None

    @property
    def in_a_frame(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._header is not None or self._begin != self._end

    def receive(self, sock: socket.socket, flags: int = 0) -> list[Frame]:
        """Receive once, and return the frames that are whole now.

        Raises ``ConnectionResetError`` at the end of the stream, ``FrameError``, and what
        ``recv_into`` raises.
        """
        rest = self._rest
        if rest is not None:
            count = sock.recv_into(rest, 0, flags)
            self._filled = count == rest.nbytes
            if count < rest.nbytes:
                self._check_end(count)
                self._rest = rest[count:]
                return []
            self._rest = None
        else:
            if self._begin == self._end:
                self._begin = self._end = 0
            elif self._end == STAGE_BYTES:
                left = self._end - self._begin
                self._stage[:left] = bytes(self._stage[self._begin : self._end])
                self._begin, self._end = 0, left
            count = sock.recv_into(self._stage[self._end :], 0, flags)
            self._check_end(count)
            self._end += count
            self._filled = self._end == STAGE_BYTES
        frames: list[Frame] = []
        while (frame := self._next()) is not None:
            frames.append(frame)
            if self._begin == self._end and self._whole is None:
                break
        return frames

    def _check_end(self, count: int) -> None:
        if count == 0:
            where = " in the middle of a message" if self.in_a_frame else ""
            raise ConnectionResetError(errno.ECONNRESET, f"it hung up{where}")

    def _next(self) -> Frame | None:
        header = self._header
        if header is None:
            begin, here = self._begin, self._end - self._begin
            if here < HEADER_BYTES:
                return None
            kind, flags, reserved, count, call, size = _HEADER.unpack_from(self._stage, begin)
            if kind not in _KINDS or reserved or count > _MAX_BUFFERS or size > _MAX_BYTES:
                raise FrameError(
                    f"expected a message of RPC, got {bytes(self._stage[begin : begin + 24])!r}"
                )
            self._begin = begin = begin + HEADER_BYTES
            if not count and here - HEADER_BYTES >= size:
                self._begin = begin + size
                return Frame(kind, flags, call, bytes(self._stage[begin : begin + size]), ())
            self._header = header = kind, flags, call, size
            self._addresses = [(count, -1)] if count else []
            self._pieces = []
        return self._go_on(*header)

    def _go_on(self, kind: int, flags: int, call: int, size: int) -> Frame | None:
        if self._addresses and self._addresses[0][1] == -1:
            table = self._take(self._addresses[0][0] * _ENTRY.size)
            if table is None:
                return None
            self._addresses = [*_ENTRY.iter_unpack(table)]
            if any(nbytes > _MAX_BYTES for nbytes, _ in self._addresses):
                raise FrameError("a message of RPC has a buffer that no machine can have")
        sizes = [size, *(nbytes for nbytes, address in self._addresses if not address)]
        while len(self._pieces) < len(sizes):
            piece = self._take(sizes[len(self._pieces)])
            if piece is None:
                return None
            self._pieces.append(piece)
        data, *inline = self._pieces
        came = iter(inline)
        buffers = [
            Buffer(nbytes, address, None if address else next(came))
            for nbytes, address in self._addresses
        ]
        self._header, self._pieces, self._addresses = None, [], []
        return Frame(kind, flags, call, data, buffers)

    def _take(self, size: int) -> memoryview | None:
        """Return the next ``size`` bytes, as memory of their own; None if they have not come."""
        if self._whole is not None:
            whole = None if self._rest is not None else self._whole
            if whole is not None:
                self._whole = None
            return whole
        here = self._end - self._begin
        if here >= size:
            begin, self._begin = self._begin, self._begin + size
            return memoryview(bytearray(self._stage[begin : begin + size]))
        if size > _DIRECT:
            try:
                whole = np.empty(size, np.uint8).data
            except (MemoryError, ValueError) as error:
                raise FrameError(f"a message of RPC wants {size} bytes of memory") from error
            whole[:here] = self._stage[self._begin : self._end]
            self._begin = self._end = 0
            self._whole, self._rest = whole, whole[here:]
        elif STAGE_BYTES - self._begin < size:
            self._stage[:here] = bytes(self._stage[self._begin : self._end])
            self._begin, self._end = 0, here
        return None
