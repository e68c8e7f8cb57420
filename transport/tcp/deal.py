"""A large payload on its way over the connections of a link, in shares that both ends know.

The shares are what each connection may have under way: a young one, which has little, would hold
up the others if it got as much as they. Both ends find from them which bytes are whose, so that
nothing is said beside the shares.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from operator import itemgetter

import numpy as np

MOST_CONNECTIONS = 16
"""No link has more."""

BLOCK_BYTES = 128 << 10
"""What is dealt."""

STRIPED_BYTES = 2 * BLOCK_BYTES
"""Payloads from here on are dealt, where there are several connections."""

_LARGEST_SHARE = 255
_ONE = 1 << 20
_Step = Callable[[socket.socket, memoryview], int]
"""Moves some of the bytes; returns how many, or raises BlockingIOError."""


def shares_of(rooms: Sequence[int], nbytes: int) -> bytes:
    """Return the shares in ``nbytes`` of connections that may have so many bytes under way: none
    for one whose part is less than half a block, which would take it longer than the others theirs.
    """
    shares, total, most = bytearray(len(rooms)), 0, max(rooms)
    for room, i in sorted(zip(rooms, count(), strict=False), key=itemgetter(0), reverse=True):
        total += room
        if 2 * room * nbytes < total * BLOCK_BYTES:
            break
        shares[i] = -(-_LARGEST_SHARE * room // most)
    return bytes(shares)


def runs_of(blocks: int, shares: bytes) -> list[list[tuple[int, int]]]:
    """Return, for each connection, which of so many blocks are its own: where its runs of blocks
    begin and end. Each connection's are spread evenly.
    """
    total, before, turns, whose = sum(shares), 0, list[np.ndarray](), list[np.ndarray]()
    for i, share in enumerate(shares):
        own = blocks * (before + share) // total - blocks * before // total
        before += share
        # The middle of each of its equal parts of the payload. In whole numbers: they are the same
        # on all machines.
        turns.append((2 * np.arange(own) + 1) * _ONE // max(1, own))
        whose.append(np.full(own, i))
    owners = np.concatenate(whose)[np.argsort(np.concatenate(turns), kind="stable")]
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), blocks]
    runs: list[list[tuple[int, int]]] = [[] for _ in shares]
    for begin, end in pairwise(edges):
        runs[int(owners[begin])].append((begin, end))
    return runs


class Deal:
    """``data`` on its way over ``sockets``, which have these ``shares`` of it. The first ``there``
    bytes may be moved by now.
    """

    __slots__ = ("_at", "_data", "_end", "_runs", "_sockets", "there")

    def __init__(self, data: memoryview, sockets: Sequence[socket.socket], shares: bytes) -> None:
        self._data = data
        self.there = len(data)
        self._sockets = sockets
        size = len(data)
        self._runs = [
            [(begin * BLOCK_BYTES, min(end * BLOCK_BYTES, size)) for begin, end in reversed(runs)]
            for runs in runs_of(-(-size // BLOCK_BYTES), shares)
        ]
        # Where each socket is, and where its run ends; both behind the data when it has no more.
        self._at = [size] * len(sockets)
        self._end = [size] * len(sockets)
        for i in range(len(sockets)):
            self._go_on(i)

    def _go_on(self, i: int) -> None:
        runs = self._runs[i]
        self._at[i], self._end[i] = runs.pop() if runs else (len(self._data),) * 2

    def move(self, step: _Step, most: int) -> int:
        """Move some bytes, at most so many, on each socket that can; return how many in all."""
        there, total = self.there, 0
        for i, sock in enumerate(self._sockets):
            begin = self._at[i]
            if begin >= there:
                continue
            try:
                moved = step(sock, self._data[begin : min(self._end[i], there, begin + most)])
            except BlockingIOError:
                continue
            total += moved
            self._at[i] = begin + moved
            if begin + moved == self._end[i]:
                self._go_on(i)
        return total

    @property
    def contiguous(self) -> int:
        """How many bytes from the first on have been moved."""
        return min(self._at)

    @property
    def left(self) -> list[socket.socket]:
        """The sockets that have bytes still to move, of those that may be moved by now."""
        there = self.there
        return [s for s, at in zip(self._sockets, self._at, strict=True) if at < there]
