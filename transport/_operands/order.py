"""The order of addition: one binary tree over a group's ranks, which depends on their number alone.

Ranks form aligned blocks of 1, 2, 4, … ranks. The value of a block is its lower half's, then its
upper half's; a block whose upper half is beyond the group is its lower half alone. So 6 ranks give
((0+1)+(2+3))+(4+5). Every reduction of every transport adds in this order, so its bits depend on
nothing else: no algorithm, size, placement, or moment. (After the binomial tree of MPI's reduce.)

The tree stays the same seen from any rank. The rank at distance d is ``rank ^ d``; the ranks at
distances 0, 1, 2, … fill the blocks one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from transport._link import OnPiece
from transport._operands.flat import Scratch
from transport._operands.reduce_op import Flat, ReduceOp

# Slots of scratch memory: one for each block that waits for its sibling, and one for arrivals.
_PENDING = 32
_ARRIVING = _PENDING - 1

PIECE = 64 << 10
"""The default size of a piece of work, in bytes."""


Merges = tuple[tuple[bool, ...], ...]
"""For each contribution the merges that follow once it has come. Each takes the last two values
that wait; True: the earlier of them is the lower half.
"""


@lru_cache(maxsize=1024)
def arrivals(rank: int, size: int) -> tuple[tuple[int, ...], Merges]:
    """Return in which order ``rank`` of ``size`` members takes the others' contributions, nearest
    first, and how it merges them with its own, which is there from the beginning.

    No more than log2(size) + 1 values wait at a time.
    """
    levels = (size - 1).bit_length()
    found: list[tuple[int, list[bool]]] = [(rank, [])]
    waiting: list[tuple[int, bool]] = []  # of each block its level, and whether it has any rank
    for distance in range(1 << levels):
        peer = rank ^ distance
        if peer < size and distance:
            found.append((peer, []))
        waiting.append((0, peer < size))
        while len(waiting) > 1 and waiting[-1][0] == waiting[-2][0]:
            (level, upper), (_, lower) = waiting.pop(), waiting.pop()
            if upper and lower:
                found[-1][1].append(not rank >> level & 1)
            waiting.append((level + 1, upper or lower))
    return tuple(peer for peer, _ in found[1:]), tuple(tuple(merges) for _, merges in found[1:])


@lru_cache(maxsize=1024)
def relatives(rank: int, size: int, root: int) -> tuple[int | None, tuple[tuple[int, bool], ...]]:
    """Return the parent of ``rank`` in the tree with the root ``root``, and its children.

    Children stand nearest first, each with a bool: True where its block is the lower one, whose
    value comes first. The root has no parent.
    """
    children: list[tuple[int, bool]] = []
    level = 0
    while 1 << level < size:
        own = rank >> level
        block = own >> 1
        if _speaker(block, level + 1, size, root) != rank:
            parent = _speaker(block, level + 1, size, root)
            assert parent is not None
            return parent, tuple(children)
        child = _speaker(own ^ 1, level, size, root)
        if child is not None:
            children.append((child, bool(own & 1)))
        level += 1
    return None, tuple(children)


def _speaker(block: int, level: int, size: int, root: int) -> int | None:
    """Return the member that has the value of a block of ``1 << level`` ranks; None for an empty
    block. It is the root, or the one whose last bits are the root's, where there is one.
    """
    if block << level >= size:
        return None
    for below in reversed(range(level)):
        half = block << 1 | root >> below & 1
        block = half if half << below < size else block << 1
    return block


class Subtree(NamedTuple):
    """The ranks from ``first`` on, ``1 << level`` of them as far as the group has them."""

    first: int
    level: int


def subtrees(ranks: Sequence[int], size: int) -> tuple[Subtree, ...]:
    """Return the largest blocks of a group of ``size`` that ``ranks``, rising, consist of."""
    left, found = list(ranks), list[Subtree]()
    while left:
        first, level = left[0], 0
        while 1 << level < size and not first & (1 << level):
            block = range(first, min(first + (2 << level), size))
            if left[: len(block)] != list(block):
                break
            level += 1
        found.append(Subtree(first, level))
        del left[: min(1 << level, size - first)]
    return tuple(found)


def merges_of(blocks: Sequence[Subtree]) -> Merges:
    """Return the merges behind each but the first of ``blocks``, which are those of a whole group
    in the order of their ranks.
    """
    found: list[tuple[bool, ...]] = []
    waiting: list[Subtree] = []
    for number, block in enumerate(blocks):
        waiting.append(block)
        last, merged = number == len(blocks) - 1, 0
        while len(waiting) > 1:
            upper, (first, level) = waiting[-1], waiting[-2]
            # Behind the last, upper halves are as small as the group leaves them.
            if not last and (upper.level != level or first & (1 << level)):
                break
            waiting[-2:] = [Subtree(first, max(level, upper.level) + 1)]
            merged += 1
        found.append((True,) * merged)
    return tuple(found[1:])


def are_one_tree(groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the tree over all ranks is one over ``groups`` of them, in this order.

    Then each group's own tree is below it. All groups are blocks of one size; the last may lack
    some ranks.
    """
    size, width = sum(map(len, groups)), len(groups[0])
    firsts = range(0, size, width)
    return not width & (width - 1) and list(map(list, groups)) == [
        list(range(first, min(first + width, size))) for first in firsts
    ]


class StreamingReduction:
    """Reduces the members' contributions to this rank's part as they arrive.

    ``own`` is its own contribution, in the dtype in which the op reduces, and stays as it is unless
    it is ``total``, where the result is to be. For each of the others, whose ``merges`` are those
    of ``arrivals(rank, size)``: receive into what ``expect`` returns, then ``add``. At most
    ``piece`` bytes are worked on at a time, so that they stay in a core's cache.
    """

    __slots__ = (
        "_arriving",
        "_done",
        "_merges",
        "_next",
        "_op",
        "_outs",
        "_plan",
        "_scratch",
        "_step",
        "_total",
        "_waiting",
    )

    def __init__(
        self,
        scratch: Scratch,
        op: ReduceOp,
        merges: Merges,
        own: Flat,
        total: Flat,
        piece: int,
    ) -> None:
        self._scratch = scratch
        self._op = op
        self._total = total
        self._plan = merges
        self._next = 0
        self._waiting = [own]
        self._arriving = own
        self._outs: list[Flat] = []
        self._merges: tuple[bool, ...] = ()
        self._step = max(1, piece // total.itemsize)
        self._done = 0

    def expect(
        self, dtype: np.dtype[np.generic], arriving: Flat | None = None
    ) -> tuple[Flat, OnPiece | None]:
        """Return the memory for the next member's contribution, and the listener for its progress.

        It has ``dtype``, that of the op or a narrower one. ``arriving``: take this
        memory, which must stay as it is until the last ``add``.
        """
        depth, total = len(self._waiting), self._total
        waiting = arriving
        if waiting is None or dtype != total.dtype:
            waiting = self._scratch.flat(_PENDING + depth, total.dtype, total.size)
        if arriving is None:
            same = dtype == total.dtype
            arriving = waiting if same else self._scratch.flat(_ARRIVING, dtype, total.size)
        self._waiting.append(waiting)
        self._arriving = arriving
        self._done = 0
        # The target of each merge: the result, or the memory of the place where it waits.
        merges = self._merges = self._plan[self._next]
        self._outs = [
            self._scratch.flat(_PENDING + place, total.dtype, total.size) if place else total
            for place in range(depth - 1, depth - 1 - len(merges), -1)
        ]
        works = bool(merges) or waiting is not arriving
        return arriving, self._on_piece if works and total.size > self._step else None

    def _on_piece(self, received: int) -> None:
        ready = received // self._arriving.itemsize
        if ready - self._done >= self._step:
            self._merge_to(ready)

    def add(self) -> None:
        """Add what has been received."""
        size, waiting = self._total.size, self._waiting
        if not self._done and size <= self._step:
            self._merge(waiting, self._arriving, self._outs)
        elif self._done < size:
            self._merge_to(size)
        for out in self._outs:
            waiting.pop()
            waiting[-1] = out
        self._next += 1

    def _merge_to(self, stop: int) -> None:
        """Merge what has arrived since the last time, in one piece if it is gone through once."""
        widens = self._arriving is not self._waiting[-1]
        step = self._step if widens or len(self._outs) > 1 else stop - self._done
        for start in range(self._done, stop, max(1, step)):
            part = slice(start, min(start + step, stop))
            waiting = [value[part] for value in self._waiting[-1 - len(self._outs) :]]
            arriving = self._arriving[part] if widens else waiting[-1]
            self._merge(waiting, arriving, [out[part] for out in self._outs])
        self._done = stop

    def _merge(self, waiting: list[Flat], arriving: Flat, outs: list[Flat]) -> None:
        value = waiting[-1]
        if arriving is not value:
            np.copyto(value, arriving, casting="unsafe")
        for back, (first, out) in enumerate(zip(self._merges, outs, strict=True), 2):
            earlier = waiting[-back]
            if first:
                self._op.combine(earlier, value, out)
            else:
                self._op.combine(value, earlier, out)
            value = out


def tree_reduce(
    scratch: Scratch,
    op: ReduceOp,
    parts: Sequence[Flat],
    total: Flat,
    blocks: Sequence[Subtree] | None = None,
    piece: int = PIECE,
) -> None:
    """Reduce ``parts`` into ``total``, which may be the first of them, without
    ``op.finish``. There is one part for each rank in order, or for each of ``blocks``. ``total``
    has the dtype in which the op reduces; parts may have a narrower one.
    """
    own = parts[0]
    if own is not total and (own.dtype != total.dtype or len(parts) == 1):
        np.copyto(total, own, casting="unsafe")
        own = total
    merges = arrivals(0, len(parts))[1] if blocks is None else merges_of(blocks)
    adding = StreamingReduction(scratch, op, merges, own, total, piece)
    for part in parts[1:]:
        adding.expect(part.dtype, part)
        adding.add()


def add_all(op: ReduceOp, values: Sequence[Flat]) -> None:
    """Add ``values``, those of ranks 0, 1, …, up in the first of them, writing over the others."""
    width = 1
    while width < len(values):
        for lower in range(0, len(values) - width, 2 * width):
            op.combine(values[lower], values[lower + width], values[lower])
        width *= 2
