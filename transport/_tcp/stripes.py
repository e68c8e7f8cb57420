"""A large payload striped over the k connections of a link: block i is on connection i mod k."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

BLOCK_BYTES = 128 << 10
"""The size of a block."""

STRIPED_BYTES = 2 * BLOCK_BYTES
"""Payloads of at least this size are striped if a link has several connections."""

_Step = Callable[[socket.socket, memoryview], int]
"""Moves some of the bytes; returns their number, or raises BlockingIOError."""


class Stripes:
    """The movement of ``data`` over ``sockets``. Only the first ``there`` bytes may be moved."""

    __slots__ = ("_at", "_data", "_sockets", "there")

    def __init__(self, data: memoryview, sockets: Sequence[socket.socket]) -> None:
        self._data = data
        self.there = len(data)
        self._sockets = sockets
        # The position of each socket; at or behind the end of the data when the socket is done.
        self._at = [number * BLOCK_BYTES for number in range(len(sockets))]

    def move(self, step: _Step, most: int) -> int:
        """Move at most ``most`` bytes on each socket; return the total."""
        there, total = self.there, 0
        for number, sock in enumerate(self._sockets):
            left = most
            while left and (begin := self._at[number]) < there:
                end = min(begin - begin % BLOCK_BYTES + BLOCK_BYTES, there, begin + left)
                try:
                    moved = step(sock, self._data[begin:end])
                except BlockingIOError:
                    break
                total += moved
                left -= moved
                begin += moved
                if not begin % BLOCK_BYTES:
                    begin += (len(self._sockets) - 1) * BLOCK_BYTES
                self._at[number] = begin
        return total

    @property
    def contiguous(self) -> int:
        """The number of bytes moved so far without a gap, from the beginning."""
        return min(*self._at, len(self._data))

    @property
    def left(self) -> list[socket.socket]:
        """The sockets with bytes left to move among the first ``there``."""
        there = self.there
        return [s for s, at in zip(self._sockets, self._at, strict=True) if at < there]
