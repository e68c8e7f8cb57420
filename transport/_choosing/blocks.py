"""The exchanges of recursive halving among any number of ranks (``_algorithms/halving.py``).

Ranks are cut into blocks of decreasing powers of two: 13 = 8 + 4 + 1. Data is cut into chunks, one
for each rank of the first block. The ranks of every block own all chunks in equal shares, ordered
by their bit-reversed place in the block.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class ChunkRange(NamedTuple):
    """The chunks from ``first`` up to, but not including, ``stop``."""

    first: int
    stop: int


class HalvingExchange(NamedTuple):
    """An exchange with ``partner``: this rank keeps the chunks ``kept`` and sends ``sent``."""

    partner: int
    kept: ChunkRange
    sent: ChunkRange


class HalvingSchedule(NamedTuple):
    """One rank's exchanges: first those ``inside`` its block, in order. Then it receives its
    ``own`` chunks from rank ``lower`` of the next block, and sends chunks to the ranks ``upper`` of
    the previous block.
    """

    inside: tuple[HalvingExchange, ...]
    own: ChunkRange
    lower: int | None
    upper: tuple[tuple[int, ChunkRange], ...]

    @property
    def peers(self) -> list[int]:
        """The ranks that this rank needs links to."""
        found = [exchange.partner for exchange in self.inside]
        found += [] if self.lower is None else [self.lower]
        return found + [peer for peer, _ in self.upper]


def blocks_of(size: int) -> list[tuple[int, int]]:
    """Return the first rank and the level of each block; a block of level k has 2^k ranks."""
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
        kept, sent = (upper, lower) if place >> bit & 1 else (lower, upper)
        inside.append(HalvingExchange(first + (place ^ 1 << bit), kept, sent))
        span = kept
    lower_rank, upper_ranks = None, list[tuple[int, ChunkRange]]()
    if number + 1 < len(blocks):
        lower_rank = _owner(span, blocks[number + 1], chunks)
    if number:
        width = 1 << (chunks - blocks[number - 1][1])
        for begin in range(span.first, span.stop, width):
            part = ChunkRange(begin, begin + width)
            upper_ranks.append((_owner(part, blocks[number - 1], chunks), part))
    return HalvingSchedule(tuple(inside), span, lower_rank, tuple(upper_ranks))


def halving_steps(size: int, *, apart: bool = True) -> int:
    """Return the number of frames on the longest path until the first block has the result. If
    ``apart`` is false, frames that are sent together count once.
    """
    levels = [level for _, level in blocks_of(size)]
    steps = levels[-1]
    for upper, level in zip(levels[:0:-1], levels[-2::-1], strict=True):
        steps = max(level, steps + (1 << (level - upper) if apart else 1))
    return steps


def _owner(span: ChunkRange, block: tuple[int, int], chunks: int) -> int:
    """Return the rank of ``block`` that owns the chunks ``span``."""
    first, level = block
    return first + reverse_bits(span.first >> (chunks - level), level)


def reverse_bits(number: int, bits: int) -> int:
    """Return the lowest ``bits`` bits of ``number`` in reverse order."""
    return sum((number >> bit & 1) << (bits - 1 - bit) for bit in range(bits))
