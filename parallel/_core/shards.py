"""Parts of arrays: which rows a rank has, and which parts share a collective."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from meshlib.sharding import block
from parallel._arrays import Array

DIRECT_BYTES = 256 << 10
"""From here on an array is gathered and reduced where it is, in a call of its own.

Smaller ones share a call: they are packed rank by rank, and copied once more.
"""


class Layout:
    """Arrays of ``shapes``, each split along dim 0 over ``size`` ranks, in one flat array.

    First come the whole arrays, one after the other; then the parts of those that are ``packed``,
    rank after rank. ``direct`` and ``packed`` are places in ``shapes``.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], itemsize: int, size: int) -> None:
        self.shapes: list[tuple[int, ...]] = list(shapes)
        sizes = [math.prod(shape) for shape in shapes]
        self._begins = [0, *itertools.accumulate(sizes)]
        small = [i for i, n in enumerate(sizes) if n * itemsize < DIRECT_BYTES]
        self.packed: list[int] = small if len(small) > 1 else []
        self.direct: list[int] = [i for i in range(len(sizes)) if i not in set(self.packed)]
        self._rows = [[_ends(shape, size, rank) for rank in range(size)] for shape in shapes]
        lengths = [
            sum(stop - start for start, stop in (self._rows[i][rank] for i in self.packed))
            for rank in range(size)
        ]
        self._packed_ends = list(itertools.accumulate(lengths, initial=self._begins[-1]))

    @property
    def row_sizes(self) -> list[int]:
        """How many elements the packed parts of each rank have together."""
        return [end - begin for begin, end in itertools.pairwise(self._packed_ends)]

    @property
    def count(self) -> int:
        """How many elements the flat array has."""
        return self._packed_ends[-1]

    def whole(self, flat: Array, i: int) -> Array:
        """Return whole array ``i``, a view."""
        return flat[self._begins[i] : self._begins[i + 1]].reshape(self.shapes[i])

    def parts(self, flat: Array, i: int) -> list[Array]:
        """Return each rank's part of whole array ``i``, flat views."""
        begin = self._begins[i]
        return [flat[begin + start : begin + stop] for start, stop in self._rows[i]]

    def packed_rows(self, flat: Array) -> list[Array]:
        """Return what of the packed parts is each rank's, views."""
        return [flat[begin:end] for begin, end in itertools.pairwise(self._packed_ends)]

    def in_row(self, row: Array, rank: int) -> list[tuple[int, Array]]:
        """Return (place, part) for each part in the packed row of ``rank``, flat views."""
        found: list[tuple[int, Array]] = []
        begin = 0
        for i in self.packed:
            start, stop = self._rows[i][rank]
            found.append((i, row[begin : begin + stop - start]))
            begin += stop - start
        return found

    def part_sizes(self, rank: int) -> list[int]:
        """Return how many elements of each array ``rank`` has."""
        return [stop - start for start, stop in (rows[rank] for rows in self._rows)]


def rows_of(shape: Sequence[int], size: int, rank: int) -> slice:
    """Return which rows of an array of ``shape`` rank ``rank`` of ``size`` has: as a Sharding."""
    return slice(*block(shape[0], [size], [rank]))


def row_counts(length: int, size: int) -> list[int]:
    """Return how many of ``length`` rows each of ``size`` ranks has."""
    rows = [rows_of((length,), size, rank) for rank in range(size)]
    return [own.stop - own.start for own in rows]


def _ends(shape: Sequence[int], size: int, rank: int) -> tuple[int, int]:
    rows, width = rows_of(shape, size, rank), math.prod(shape[1:])
    return rows.start * width, rows.stop * width
