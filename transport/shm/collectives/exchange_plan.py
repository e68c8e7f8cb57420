"""What an exchange does in each lap, worked out once for all calls of one shape."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transport.operands.flat import laps_of
from transport.operands.reduce_op import Flat
from transport.shm.board.board import Board
from transport.shm.board.layout import BLOCKS, LINE

_MOST_KEPT = 8
"""Laps of which the parts of blocks are kept: with more, finding them is a small part of a call."""


class Shape(NamedTuple):
    """What calls have in common that go the same way through the blocks.

    ``sends`` and ``expects`` are bytes by member, ``dtype`` is what is staged, ``itemsize`` that of
    the elements which are counted; ``same``: all members get the same. ``share`` is the bytes of a
    block that are for one member.
    """

    dtype: np.dtype[np.generic]
    itemsize: int
    same: bool
    share: int
    sends: tuple[int, ...]
    expects: tuple[int, ...]


class Outgoing(NamedTuple):
    """Elements ``start`` to ``stop`` of what is for ``peer`` go to ``into``."""

    into: Flat
    peer: int
    start: int
    stop: int


class ExchangePlan:
    """One member's part of an exchange of one shape.

    ``laps`` are those in which this member sends or gets anything, ``per_lap`` the elements of a
    share of a block. ``notes`` is what its card says where nothing is read in place; where all
    sizes are equal (``uniform``), those of all members say that.
    """

    def __init__(self, board: Board, shape: Shape) -> None:
        rank, size = board.rank, board.size
        dtype, itemsize, same = shape.dtype, shape.itemsize, shape.same
        self.shape = shape
        self.per_lap = shape.share // dtype.itemsize
        self.expected = [nbytes // itemsize for nbytes in shape.expects]
        self._counts = [nbytes // itemsize for nbytes in shape.sends]
        self.laps = max(laps_of(count, self.per_lap) for count in (*self._counts, *self.expected))
        self.uniform = len({*shape.sends, *shape.expects}) == 1
        self.notes = pack_notes(0, self.laps, shape.sends, shape.expects, [0] * size)
        self._blocks = board.blocks(dtype)
        self._rank = rank
        self._same = same
        self._receivers = [rank] if same else board.peers
        self._outgoing: dict[int, list[Outgoing]] = {}
        self._incoming: dict[int, list[Flat]] = {}

    def outgoing(self, lap: int, slot: int) -> list[Outgoing]:
        """Return what this member stages in ``lap``, whose block is its ``slot``."""
        key = lap * BLOCKS + slot
        found = self._outgoing.get(key)
        if found is None:
            found = self._stagings(lap, self._blocks[self._rank][slot])
            if lap < _MOST_KEPT:
                self._outgoing[key] = found
        return found

    def incoming(self, lap: int, slot: int) -> list[Flat]:
        """Return where it finds what the members staged for it in ``lap`` (own: empty)."""
        key = lap * BLOCKS + slot
        found = self._incoming.get(key)
        if found is None:
            found = [self._arrival(lap, peer, slot) for peer in range(len(self._blocks))]
            if lap < _MOST_KEPT:
                self._incoming[key] = found
        return found

    def _stagings(self, lap: int, block: Flat) -> list[Outgoing]:
        start, stagings = lap * self.per_lap, list[Outgoing]()
        for peer in self._receivers:
            stop = min(start + self.per_lap, self._counts[peer])
            if start < stop:
                at = 0 if self._same else _share(peer, self._rank) * self.per_lap
                stagings.append(Outgoing(block[at : at + stop - start], peer, start, stop))
        return stagings

    def _arrival(self, lap: int, peer: int, slot: int) -> Flat:
        block = self._blocks[peer][slot]
        if peer == self._rank:
            return block[:0]
        at = 0 if self._same else _share(self._rank, peer) * self.per_lap
        start = lap * self.per_lap
        return block[at : at + max(0, min(self.per_lap, self.expected[peer] - start))]


def share_among(block: int, members: int) -> int:
    """Return the bytes of each share where ``members`` share a block of ``block`` bytes."""
    return block // members // LINE * LINE or LINE


def pack_notes(
    in_place: int, laps: int, sends: Sequence[int], expects: Sequence[int], places: Sequence[int]
) -> bytes:
    """Return the notes on a card: whether the parts are read in place, the number of laps, and
    then three lists by member: bytes sent, bytes expected, and places.
    """
    return struct.pack(f"={2 + 3 * len(places)}Q", in_place, laps, *sends, *expects, *places)


def _share(peer: int, owner: int) -> int:
    """Return which share of ``owner``'s block is ``peer``'s: it has none for itself."""
    return peer - (peer > owner)
