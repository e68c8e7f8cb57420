"""The order of addition: a binary tree over a group's ranks, which depends only on their number.

Ranks form aligned blocks of 1, 2, 4, … ranks. The value of a block is the sum of its lower and its
upper half, or just the lower half if the upper half is empty. So 6 ranks give
((0+1)+(2+3))+(4+5). Every reduction of every transport adds in this order. The bits of a result
therefore do not depend on algorithm, data size, placement or timing. (After the binomial tree of
MPI's reduce.)

The tree looks the same from any rank. The rank at distance d is ``rank ^ d``; the ranks at
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

# Scratch slots: one for each block that waits for its sibling, and one for arriving data.
_PENDING = 32
_ARRIVING = _PENDING - 1

PIECE = 64 << 10
"""The default size of a piece of work, in bytes."""


Merges = tuple[tuple[bool, ...], ...]
"""For each contribution, the merges that follow its arrival. Each merges the last two pending
values; True means that the earlier value is the lower half.
"""


@lru_cache(maxsize=1024)
def arrivals(rank: int, size: int) -> tuple[tuple[int, ...], Merges]:
    """Return the order in which ``rank`` of ``size`` members adds the others' contributions,
    nearest first, and the merges after each. Its own contribution is pending from the start.

    At most log2(size) + 1 values are pending at a time.
    """
    levels = (size - 1).bit_length()
    found: list[tuple[int, list[bool]]] = [(rank, [])]
    waiting: list[tuple[int, bool]] = []  # Each block's level, and whether it has any ranks.
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
    """Return the parent of ``rank`` (None for the root) and its children in the tree of ``root``.

    Children are ordered nearest first. The bool of a child is True if its block is the lower half,
    whose value is the first operand.
    """
    children: list[tuple[int, bool]] = []
    level = 0
    while 1 << level < size:
        own = rank >> level
        block = own >> 1
        if _representative(block, level + 1, size, root) != rank:
            parent = _representative(block, level + 1, size, root)
            assert parent is not None
            return parent, tuple(children)
        child = _representative(own ^ 1, level, size, root)
        if child is not None:
            children.append((child, bool(own & 1)))
        level += 1
    return None, tuple(children)


def _representative(block: int, level: int, size: int, root: int) -> int | None:
    """Return the member that holds the value of a block of ``1 << level`` ranks, or None for an
    empty block. It is the root, or else the member whose last bits equal the root's, if possible.
    """
    if block << level >= size:
        return None
    for below in reversed(range(level)):
        half = block << 1 | root >> below & 1
        block = half if half << below < size else block << 1
    return block


class Subtree(NamedTuple):
    """The ``1 << level`` ranks from ``first`` on, fewer at the end of the group."""

    first: int
    level: int


def subtrees(ranks: Sequence[int], size: int) -> tuple[Subtree, ...]:
    """Return the largest blocks of a group of ``size`` that make up ``ranks``, which ascend."""
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
    """Return the merges after each of ``blocks`` except the first. ``blocks`` make up a whole
    group, in rank order.
    """
    found: list[tuple[bool, ...]] = []
    waiting: list[Subtree] = []
    for number, block in enumerate(blocks):
        waiting.append(block)
        last, merged = number == len(blocks) - 1, 0
        while len(waiting) > 1:
            upper, (first, level) = waiting[-1], waiting[-2]
            # After the last block, all pending blocks merge, even if an upper half is incomplete.
            if not last and (upper.level != level or first & (1 << level)):
                break
            waiting[-2:] = [Subtree(first, max(level, upper.level) + 1)]
            merged += 1
        found.append((True,) * merged)
    return tuple(found[1:])


def are_one_tree(groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the tree over all ranks is a tree over ``groups`` of ranks, in this order,
    with each group's own tree below it.

    This holds if all groups are blocks of one size; the last group may have fewer ranks.
    """
    size, width = sum(map(len, groups)), len(groups[0])
    firsts = range(0, size, width)
    return not width & (width - 1) and list(map(list, groups)) == [
        list(range(first, min(first + width, size))) for first in firsts
    ]


class StreamingReduction:
    """Reduces the members' contributions to this rank's part as they arrive.

    ``own`` is this rank's contribution, in the reduction dtype; it is not changed unless it is
    ``total``, the result. ``merges`` come from ``arrivals(rank, size)``. For each other member, in
    the order of ``arrivals``, receive into the memory that ``expect`` returns, then call ``add``.
    Data is processed in pieces of at most ``piece`` bytes, which stay in a core's cache.
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

        ``dtype`` is the reduction dtype or a narrower one. ``arriving``, if given, is used as the
        memory; it must not change until the last ``add``.
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
        # The target of each merge: the result, or the scratch slot of its pending value.
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
        """Add the contribution that was received since ``expect``."""
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
        """Merge the elements that arrived since the last time. One merge needs no pieces."""
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
    """Reduce ``parts`` into ``total``, which may be ``parts[0]``, without ``op.finish``.

    There is one part for each rank, in order, or for each of ``blocks``. ``total`` has the
    reduction dtype; parts may have a narrower one.
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
    """Reduce ``values``, one for each rank in order, into ``values[0]``; overwrite the others."""
    width = 1
    while width < len(values):
        for lower in range(0, len(values) - width, 2 * width):
            op.combine(values[lower], values[lower + width], values[lower])
        width *= 2
