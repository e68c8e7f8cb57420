"""The exchanges of recursive halving among any number of ranks (``algorithms/halving.py``).

Ranks are cut into blocks of falling powers of two: 13 = 8 + 4 + 1. Data is cut into chunks, one for
each rank of the first block. The ranks of a block share all chunks: the fewer they are, the more
each owns, in the order of their places with the bits reversed.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class ChunkRange(NamedTuple):
    """Chunks ``first`` to ``stop``."""

    first: int
    stop: int


class HalvingExchange(NamedTuple):
    """With ``partner``, what this rank keeps and what it gives away."""

    partner: int
    kept: ChunkRange
    given: ChunkRange


class HalvingSchedule(NamedTuple):
    """One rank's exchanges ``inside`` its block, in order. Then the rank takes its ``own`` chunks
    ``over`` from a rank of the next block, and hands chunks ``up`` to the block before.
    """

    inside: tuple[HalvingExchange, ...]
    own: ChunkRange
    over: int | None
    up: tuple[tuple[int, ChunkRange], ...]

    @property
    def peers(self) -> list[int]:
        """The ranks that this one needs links to."""
        found = [exchange.partner for exchange in self.inside]
        found += [] if self.over is None else [self.over]
        return found + [peer for peer, _ in self.up]


def blocks_of(size: int) -> list[tuple[int, int]]:
    """Return the first rank of each block and the block's level, its ranks' number's logarithm."""
    levels = [level for level in reversed(range(size.bit_length())) if size >> level & 1]
    firsts = [0, *accumulate(1 << level for level in levels)]
    return list(zip(firsts, levels, strict=False))


@lru_cache(maxsize=256)
def halving_schedule(rank: int, size: int) -> HalvingSchedule:
    """Return the exchanges of ``rank`` among ``size`` ranks."""
    blocks = blocks_of(size)
    number = max(i for i, (first, _) in enumerate(blocks) if first <= rank)
    first, level = blocks[number]
    chunks = blocks[0][1]
    span, inside = ChunkRange(0, 1 << chunks), list[HalvingExchange]()
    for bit in range(level):
        middle = (span.first + span.stop) // 2
        lower, upper = ChunkRange(span.first, middle), ChunkRange(middle, span.stop)
        place = rank - first
        kept, given = (upper, lower) if place >> bit & 1 else (lower, upper)
        inside.append(HalvingExchange(first + (place ^ 1 << bit), kept, given))
        span = kept
    over, up = None, list[tuple[int, ChunkRange]]()
    if number + 1 < len(blocks):
        over = _owner(span, blocks[number + 1], chunks)
    if number:
        width = 1 << (chunks - blocks[number - 1][1])
        for begin in range(span.first, span.stop, width):
            part = ChunkRange(begin, begin + width)
            up.append((_owner(part, blocks[number - 1], chunks), part))
    return HalvingSchedule(tuple(inside), span, over, tuple(up))


def halving_steps(size: int, *, apart: bool = True) -> int:
    """Return how many frames lie one after the other until the first block has everything; frames
    that leave together count once unless they are to be taken ``apart``.
    """
    levels = [level for _, level in blocks_of(size)]
    steps = levels[-1]
    for upper, level in zip(levels[:0:-1], levels[-2::-1], strict=True):
        steps = max(level, steps + (1 << (level - upper) if apart else 1))
    return steps


def _owner(span: ChunkRange, block: tuple[int, int], chunks: int) -> int:
    """Return the rank of a block that owns a span: its place has the rank's bits, reversed."""
    first, level = block
    return first + reverse_bits(span.first >> (chunks - level), level)


def reverse_bits(number: int, bits: int) -> int:
    """Return the lowest ``bits`` of a number in the opposite order."""
    return sum((number >> bit & 1) << (bits - 1 - bit) for bit in range(bits))
