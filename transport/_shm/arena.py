"""Symmetric memory: each member's array is at the same offset in its part of a shared segment.

Allocation is collective. All members compute the same layout from common data: the list of blocks,
and the blocks that no member refers to any more. A member releases an array's block when the last
view is gone. A block is reused once all members have released it. Segments without a used block
are unmapped before a new one is made.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transport._operands.reduce_op import Flat
from transport._shm.segment import Segment, pages

_LEAST = 256 << 10
"""The smallest part of a segment, in bytes per member."""

_ALIGNMENT = 64


@dataclass(slots=True)
class _Allocation:
    """A block in every member's part of segment ``number``.

    ``held``: this member refers to it; ``used``: any member did, when they last compared.
    """

    number: int
    offset: int
    nbytes: int
    held: bool = False
    used: bool = False


class Arena:
    """One member's view of the group's symmetric memory. One thread at a time.

    ``follow`` is called when the mapped segments change, with (number, address, bytes per member)
    for each.
    """

    def __init__(
        self, rank: int, size: int, follow: Callable[[list[tuple[int, int, int]]], object]
    ) -> None:
        self._rank = rank
        self._follow = follow
        self._size = size
        self._segments: dict[int, tuple[Segment, int]] = {}
        self._blocks: list[_Allocation] = []
        self._next_number = 0
        # Filled by finalizers, which run at any moment in any thread.
        self._dropped: deque[_Allocation] = deque()

    # Allocating. All members make these calls, in this order.

    def dropped(self) -> npt.NDArray[np.uint8]:
        """Return a uint8 array: for each block, 1 if this member does not hold it."""
        while self._dropped:
            self._dropped.popleft().held = False
        return np.array([not block.held for block in self._blocks], np.uint8)

    def settle(self, free: npt.NDArray[np.uint8], nbytes: int) -> bool:
        """Mark the blocks that no member uses: those with a 1 in ``free``, the minimum of all
        members' ``dropped``. Return whether ``nbytes`` fit; otherwise a new segment is needed.
        """
        self._merge(free)
        need = _round(nbytes)
        if any(not block.used and block.nbytes >= need for block in self._blocks):
            return True
        parts = {number: part for number, (_, part) in self._segments.items()}
        idle = {b.number for b in self._blocks if not b.used and b.nbytes == parts[b.number]}
        self._blocks = [block for block in self._blocks if block.number not in idle]
        for number in idle:
            del self._segments[number]
        self._publish_layout()
        return False

    def new_segment(self, nbytes: int) -> tuple[int, int]:
        """Return the number of the next segment, and its size for ``nbytes`` per member."""
        return self._next_number, max(pages(_round(nbytes)), _LEAST) * self._size

    def add(self, segment: Segment) -> None:
        """Add the next segment, while all members do. Raises OSError if this member's part gets
        no memory.
        """
        part = segment.nbytes // self._size
        segment.allocate(self._rank * part, part, self._size)
        self._segments[self._next_number] = (segment, part)
        self._blocks.append(_Allocation(self._next_number, 0, part))
        self._next_number += 1
        self._publish_layout()

    def take(self, count: int, dtype: np.dtype[np.generic]) -> Flat:
        """Return an array in the first of the smallest blocks with room, which ``settle`` has found
        or ``add`` has made.
        """
        need = _round(count * dtype.itemsize)
        fitting = [block for block in self._blocks if not block.used and block.nbytes >= need]
        block = min(fitting, key=lambda block: block.nbytes)
        if block.nbytes > need:
            rest = _Allocation(block.number, block.offset + need, block.nbytes - need)
            self._blocks.insert(self._blocks.index(block) + 1, rest)
            block.nbytes = need
        block.used = block.held = True
        segment, part = self._segments[block.number]
        start = self._rank * part + block.offset
        # The base of every view is this array, because its own base is not an array.
        memory = np.frombuffer(segment.data, np.uint8, need, start)
        weakref.finalize(memory, self._dropped.append, block).atexit = False
        return memory[: count * dtype.itemsize].view(dtype)

    def _merge(self, free: npt.NDArray[np.uint8]) -> None:
        merged: list[_Allocation] = []
        for block, unused in zip(self._blocks, free, strict=True):
            last = merged[-1] if merged else None
            joins = last is not None and not last.used and last.number == block.number
            if unused and joins and last is not None:
                last.nbytes += block.nbytes
                continue
            block.used = not unused
            merged.append(block)
        self._blocks = merged

    def _publish_layout(self) -> None:
        self._follow([(n, of.address, part) for n, (of, part) in self._segments.items()])


def _round(nbytes: int) -> int:
    """Return the bytes of the block for ``nbytes``: aligned, or whole pages for large arrays."""
    if nbytes >= _LEAST:
        return pages(nbytes)
    return max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
