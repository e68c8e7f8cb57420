"""The protocol between a TCPStore and its server.

A request is ``length, id, op, timeout`` and fields; a reply is ``length, id, status`` and fields
(``transport._store.fields``). A length does not include itself; all numbers are little-endian.
Replies may arrive in another order than requests; ids match them.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

from transport._store.fields import LENGTH, LENGTH_BYTES, WireError, pack_fields

REQUEST = struct.Struct("<IIBd")
REPLY = struct.Struct("<IIB")

MAX_FRAME = 1 << 30
"""The longest frame, in bytes. A frame that announces more ends the connection unread."""


class Status(enum.IntEnum):
    """The outcome of a request."""

    OK = 0
    TIMEOUT = 1
    ERROR = 2


def pack_request(number: int, op: int, timeout: float, fields: Sequence[bytes]) -> bytes:
    """Return a request; raise ValueError if it is longer than ``MAX_FRAME``."""
    body = pack_fields(fields)
    length = REQUEST.size - LENGTH_BYTES + len(body)
    if length > MAX_FRAME:
        raise ValueError(f"a store request of {length} bytes is too long; at most {MAX_FRAME}")
    return REQUEST.pack(length, number, op, timeout) + body


def pack_reply(number: int, status: int, fields: Sequence[bytes]) -> bytes:
    """Return a reply."""
    body = pack_fields(fields)
    return REPLY.pack(REPLY.size - LENGTH_BYTES + len(body), number, status) + body


class Frames:
    """Cuts a stream into frames, each of which begins with the struct ``header``."""

    __slots__ = ("_header_bytes", "_rest")

    def __init__(self, header: struct.Struct) -> None:
        self._header_bytes = header.size
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data`` to the stream; return the frames that it completes.

        Raises WireError if a frame announces an impossible length. No memory is allocated before
        its bytes arrive.
        """
        rest = self._rest
        # Usually, data is exactly one frame.
        if not rest and len(data) >= LENGTH_BYTES and self._size(data, 0) == len(data):
            return [data]
        rest += data
        frames: list[bytes] = []
        begin = 0
        while len(rest) - begin >= LENGTH_BYTES:
            end = begin + self._size(rest, begin)
            if end > len(rest):
                break
            frames.append(bytes(rest[begin:end]))
            begin = end
        if begin:
            del rest[:begin]
        return frames

    def _size(self, data: bytes | bytearray, begin: int) -> int:
        return frame_size(data, begin, self._header_bytes)


def frame_size(data: bytes | bytearray, begin: int, header_bytes: int) -> int:
    """Return the size of the frame at ``data[begin:]``, whose length field must be complete.

    Raises WireError if the frame is shorter than its header, or longer than ``MAX_FRAME``.
    """
    size = LENGTH.unpack_from(data, begin)[0] + LENGTH_BYTES
    if not header_bytes <= size <= MAX_FRAME + LENGTH_BYTES:
        raise WireError(f"a frame announces {size} bytes")
    return size
