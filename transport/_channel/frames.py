"""The frames of a connection. Received bytes that are not frames raise ``FrameError``.

A frame begins with a header of 24 bytes: kind, flags, number of buffers, number, size of the data.
A table of 16 bytes per buffer (size, address), the data and the buffers follow. A buffer with an
address is not sent: the receiver copies it from the sender's memory.
"""

from __future__ import annotations

import enum
import errno
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transport._errors import DistNetworkError

_HEADER = struct.Struct("<BBHIQQ")
HEADER_BYTES = _HEADER.size
_ENTRY = struct.Struct("<QQ")
STAGE_BYTES = 128 << 10
"""The bytes received at once. A piece larger than half of this is received into its own memory."""
_DIRECT = STAGE_BYTES // 2
_MAX_BUFFERS = 1 << 20
_MAX_BYTES = 1 << 44


class FrameError(DistNetworkError):
    """The received bytes are not a frame: the connection cannot be used any more."""


class Control(enum.IntEnum):
    """The kinds of frames that the channel itself exchanges."""

    HELLO = 1
    """The greeting, in three frames on each new connection: who can read the other's memory."""
    FETCHED = 2
    """The peer has copied the buffers of the frame ``number`` from the sender's memory."""
    POST = 3
    """A message that survives broken connections, or its acknowledgement; ``number`` counts."""


FIRST_KIND = 16
"""The first kind for the user of the channel."""


class FrameBuffer(NamedTuple):
    """A buffer of a frame. ``memory`` is None if it is at ``address`` in the sender's memory."""

    nbytes: int
    address: int
    memory: memoryview | None


class ChannelFrame(NamedTuple):
    """A received frame."""

    kind: int
    flags: int
    number: int
    data: bytes | memoryview
    buffers: Sequence[FrameBuffer]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the frame occupies."""
        return len(self.data) + sum(b.nbytes for b in self.buffers if b.memory is not None)


def pack(
    kind: int,
    number: int,
    data: bytes,
    buffers: Sequence[memoryview] = (),
    addresses: Sequence[int] = (),
    flags: int = 0,
) -> list[bytes | memoryview]:
    """Return the pieces of a frame, in sending order.

    ``addresses`` has the address of each buffer that the peer copies itself; 0 if it is sent.
    """
    header = _HEADER.pack(kind, flags, 0, len(buffers), number, len(data))
    if not buffers:
        return [header + data]
    table = b"".join(
        _ENTRY.pack(buffer.nbytes, address)
        for buffer, address in zip(buffers, addresses, strict=True)
    )
    inline = [b for b, address in zip(buffers, addresses, strict=True) if not address and b.nbytes]
    return [header + table + data, *inline]


class FrameReader:
    """Cuts a socket's stream into frames. One thread at a time."""

    def __init__(self) -> None:
        self._memory = bytearray(STAGE_BYTES)
        self._stage = memoryview(self._memory)
        self._begin = self._end = 0
        # The header, the table, and the arrived pieces of a partial frame.
        self._header: tuple[int, int, int, int] | None = None
        self._addresses: list[tuple[int, int]] = []
        self._pieces: list[memoryview] = []
        # The memory of a large piece, and the part of it that has not arrived.
        self._whole: memoryview | None = None
        self._rest: memoryview | None = None
        self._filled = False

    @property
    def may_have_more(self) -> bool:
        """True if the last receive filled its buffer, so the socket may have more bytes."""
        return self._filled or self._rest is not None

    @property
    def in_a_frame(self) -> bool:
        """True if a frame is partly received."""
        return self._header is not None or self._begin != self._end

    def receive(self, sock: socket.socket, flags: int = 0) -> list[ChannelFrame]:
        """Receive once, and return the frames that are complete now.

        Raises ``ConnectionResetError`` at the end of the stream, ``FrameError``, and the errors of
        ``recv_into``.
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
        frames: list[ChannelFrame] = []
        while (frame := self._next()) is not None:
            frames.append(frame)
            if self._begin == self._end and self._whole is None:
                break
        return frames

    def _check_end(self, count: int) -> None:
        if count == 0:
            where = " within a frame" if self.in_a_frame else ""
            raise ConnectionResetError(errno.ECONNRESET, f"it hung up{where}")

    def _next(self) -> ChannelFrame | None:
        header = self._header
        if header is None:
            begin, here = self._begin, self._end - self._begin
            if here < HEADER_BYTES:
                return None
            kind, flags, reserved, count, number, size = _HEADER.unpack_from(self._stage, begin)
            if not kind or reserved or count > _MAX_BUFFERS or size > _MAX_BYTES:
                raise FrameError(
                    f"expected a frame, got {bytes(self._stage[begin : begin + 24])!r}"
                )
            self._begin = begin = begin + HEADER_BYTES
            if not count and here - HEADER_BYTES >= size:
                self._begin = begin + size
                return ChannelFrame(
                    kind, flags, number, bytes(self._stage[begin : begin + size]), ()
                )
            self._header = header = kind, flags, number, size
            self._addresses = [(count, -1)] if count else []
            self._pieces = []
        return self._go_on(*header)

    def _go_on(self, kind: int, flags: int, number: int, size: int) -> ChannelFrame | None:
        if self._addresses and self._addresses[0][1] == -1:
            table = self._take(self._addresses[0][0] * _ENTRY.size)
            if table is None:
                return None
            self._addresses = [*_ENTRY.iter_unpack(table)]
            if any(nbytes > _MAX_BYTES for nbytes, _ in self._addresses):
                raise FrameError(f"a frame announces a buffer of more than {_MAX_BYTES} bytes")
        sizes = [size, *(nbytes for nbytes, address in self._addresses if not address)]
        while len(self._pieces) < len(sizes):
            piece = self._take(sizes[len(self._pieces)])
            if piece is None:
                return None
            self._pieces.append(piece)
        data, *inline = self._pieces
        pieces = iter(inline)
        buffers = [
            FrameBuffer(nbytes, address, None if address else next(pieces))
            for nbytes, address in self._addresses
        ]
        self._header, self._pieces, self._addresses = None, [], []
        return ChannelFrame(kind, flags, number, data, buffers)

    def _take(self, size: int) -> memoryview | None:
        """Return the next ``size`` bytes in separate memory; None if they have not arrived."""
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
                raise FrameError(f"a frame needs {size} bytes of memory") from error
            whole[:here] = self._stage[self._begin : self._end]
            self._begin = self._end = 0
            self._whole, self._rest = whole, whole[here:]
        elif STAGE_BYTES - self._begin < size:
            self._stage[:here] = bytes(self._stage[self._begin : self._end])
            self._begin, self._end = 0, here
        return None
