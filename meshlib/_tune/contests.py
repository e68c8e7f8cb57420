"""The comparisons of ``meshlib tune``: one for each field of ``Thresholds``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Thresholds

_NEVER, _ALWAYS = -1, 1 << 62
# Stars for small data, or a choice by the cost of a frame, would hide the other algorithms.
_NO_STARS = replace(DEFAULT, star_ranks=0, frame=0)
_ALL_STARS = replace(DEFAULT, star_ranks=1 << 20, frame=0)
KIB, MIB = 1 << 10, 1 << 20


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(1 << exponent for exponent in range(first.bit_length() - 1, last.bit_length()))


@dataclass(frozen=True, slots=True)
class Contest:
    """Two algorithms on either side of one threshold.

    Up to the size ``field``, ``below`` is better than ``above``. If members have parts, the size is
    that of all parts together. With fewer than ``least_ranks`` ranks the two do not differ.
    ``others`` has the values of all other fields.
    """

    field: str
    kind: Kind
    sizes: tuple[int, ...]
    least_ranks: int = 2
    others: Thresholds = _NO_STARS

    @property
    def below(self) -> Thresholds:
        """The table that always selects the algorithm for small data."""
        return replace(self.others, **{self.field: _ALWAYS})

    @property
    def above(self) -> Thresholds:
        """The table that never selects the algorithm for small data."""
        return replace(self.others, **{self.field: _NEVER})


_TCP: Sequence[Contest] = (
    Contest("star", Kind.ALL_REDUCE, _powers(8, 256 * KIB), 3, _ALL_STARS),
    Contest("all_reduce_doubling", Kind.ALL_REDUCE, _powers(8 * KIB, 4 * MIB)),
    Contest(
        "reduce_scatter_doubling",
        Kind.REDUCE_SCATTER,
        _powers(KIB, MIB),
        DEFAULT.doubling_ranks,
    ),
    Contest("all_gather_doubling", Kind.ALL_GATHER, _powers(KIB, MIB), DEFAULT.doubling_ranks),
    Contest("broadcast_tree", Kind.BROADCAST, _powers(32 * KIB, 8 * MIB), 3),
    Contest("reduce_tree", Kind.REDUCE, _powers(32 * KIB, 8 * MIB), 5),
)
CONTESTS: Mapping[str, Sequence[Contest]] = {
    "tcp": _TCP,
    "inproc": _TCP,
    "hierarchical": (Contest("one_slice", Kind.ALL_REDUCE, _powers(4 * KIB, 2 * MIB), 4),),
}
LARGE_BYTES = 16 * MIB
SEGMENTS: tuple[int, ...] = (128 * KIB, 256 * KIB, 512 * KIB, MIB)
"""The values of ``segment`` to compare for ``LARGE_BYTES``."""
EXCHANGED = (8, KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
"""The sizes to measure for the costs of a frame and of a byte."""
