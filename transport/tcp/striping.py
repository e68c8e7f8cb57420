"""One frame over several connections: its payload is dealt to them in blocks, by turns."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

BLOCK_BYTES = 128 << 10

STRIPED_BYTES = 2 * BLOCK_BYTES
"""Payloads from here on are dealt, where there are several connections."""

_Step = Callable[[socket.socket, memoryview], int]
"""Moves some of the bytes; returns how many, or raises BlockingIOError."""


class Deal:
    """``data`` on its way over ``sockets``: block i belongs to socket i mod n."""

    __slots__ = ("_at", "_data", "_sockets")

    def __init__(self, data: memoryview, sockets: Sequence[socket.socket]) -> None:
        self._data = data
        self._sockets = sockets
        self._at = [i * BLOCK_BYTES for i in range(len(sockets))]

    def move(self, step: _Step) -> int:
        """Move some bytes on each socket that can; return how many in all."""
        size, stride, total = len(self._data), (len(self._sockets) - 1) * BLOCK_BYTES, 0
        for i, sock in enumerate(self._sockets):
            begin = self._at[i]
            if begin >= size:
                continue
            end = min(size, begin - begin % BLOCK_BYTES + BLOCK_BYTES)
            try:
                count = step(sock, self._data[begin:end])
            except BlockingIOError:
                continue
            total += count
            self._at[i] = begin + count + (stride if begin + count == end else 0)
        return total

    @property
    def contiguous(self) -> int:
        """How many bytes from the first on have been moved."""
        return min(*self._at, len(self._data))

    @property
    def left(self) -> list[socket.socket]:
        """The sockets that have bytes still to move."""
        size = len(self._data)
        return [s for s, at in zip(self._sockets, self._at, strict=True) if at < size]
