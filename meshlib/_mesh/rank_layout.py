"""The ranks of a mesh by coordinate: a layout over a numbering of ranks.

A mesh may have any ranks in any order. The numbering (position to rank) is separate from the
arithmetic (coordinates to position). So a mesh over ranks 0 to n-1 needs no memory for them, and
slicing never reads ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshlib._mesh.layout import Dim, IndexArray, Layout, join


@dataclass(frozen=True, slots=True, eq=False)
class RankNumbering:
    """The ranks of a mesh by position: a ``range``, or an array of distinct int64."""

    ranks: range | IndexArray

    @classmethod
    def of(cls, ranks: npt.ArrayLike, where: str) -> RankNumbering:
        """Return the numbering of ``ranks`` in C order; ``where`` names them in errors.

        Raises ValueError for an empty array, and unless the ranks are distinct integers >= 0.
        """
        flat = np.asarray(ranks).ravel()
        if not flat.size:
            raise ValueError(f"{where} is empty; expected at least one rank")
        if flat.dtype.kind not in "iu":
            raise ValueError(f"{where} has dtype {flat.dtype}; expected integer ranks")
        strange = flat.min() if flat.min() < 0 else flat.max()
        if not 0 <= int(strange) <= np.iinfo(np.int64).max:
            raise ValueError(f"{where} has rank {strange}; expected ranks >= 0, below 2**63")
        flat = flat.astype(np.int64)
        first = int(flat[0])
        step = int(flat[1]) - first if flat.size > 1 else 1
        if step and np.all(np.diff(flat) == step):
            return cls(range(first, first + step * flat.size, step))
        twice = _first_repeated(flat)
        if twice is not None:
            raise ValueError(f"{where} has rank {twice} twice; expected each rank once")
        flat.flags.writeable = False
        return cls(flat)

    def __len__(self) -> int:
        return len(self.ranks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankNumbering):
            return NotImplemented
        if isinstance(self.ranks, range) or isinstance(other.ranks, range):
            # An array is never a progression, so it never equals a range.
            return self.ranks is other.ranks or (
                type(self.ranks) is type(other.ranks) and bool(self.ranks == other.ranks)
            )
        return self.ranks is other.ranks or np.array_equal(self.ranks, other.ranks)

    def __hash__(self) -> int:
        return hash((len(self), int(self.ranks[0]), int(self.ranks[-1])))

    def position(self, rank: int) -> int | None:
        """Return the position of ``rank``, None if it is not in the numbering."""
        if isinstance(self.ranks, range):
            return self.ranks.index(rank) if rank in self.ranks else None
        found = np.flatnonzero(self.ranks == rank)
        return int(found[0]) if found.size else None

    def take(self, positions: IndexArray) -> IndexArray:
        """Return the ranks at ``positions``, int64, in their shape."""
        if isinstance(self.ranks, range):
            return self.ranks.start + self.ranks.step * positions
        return self.ranks[positions]

    def largest(self) -> int:
        """Return the largest rank."""
        if isinstance(self.ranks, range):
            return max(self.ranks[0], self.ranks[-1])
        return int(self.ranks.max())


@dataclass(frozen=True, slots=True, eq=False)
class RankLayout:
    """Dims over numbered ranks, which form slices of the layout's shape.

    Copies of the layout cover the ranks; each rank is in one copy, its slice. Two objects with
    equal shapes and slices are equal, whatever the numbering.
    """

    numbering: RankNumbering
    layout: Layout

    @classmethod
    def of(cls, mesh: npt.ArrayLike, where: str = "mesh") -> RankLayout:
        """Return the layout with ``mesh`` (nested lists, or an array of ranks) as its one slice.

        Raises ValueError for a ragged or 0-D ``mesh``, and the errors of ``RankNumbering.of``.
        """
        try:
            array = np.asarray(mesh)
        except ValueError:
            raise ValueError(f"{where} {mesh!r} is ragged; expected rows of equal length") from None
        if not array.ndim:
            raise ValueError(f"{where} {mesh!r} has no dim; expected a list of ranks")
        numbering = RankNumbering.of(array, where)
        return cls(numbering, Layout.row_major(array.shape))

    @classmethod
    def row_major(cls, shape: Sequence[int]) -> RankLayout:
        """Return the layout of ranks 0 to n-1 in C order, without memory for the ranks."""
        return cls(RankNumbering(range(math.prod(shape))), Layout.row_major(shape))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankLayout):
            return NotImplemented
        if self.layout.shape != other.layout.shape or len(self.numbering) != len(other.numbering):
            return False
        if self.layout == other.layout and self.numbering == other.numbering:
            return True
        return np.array_equal(self._ordered_slices(), other._ordered_slices())

    def __hash__(self) -> int:
        # Only properties that equal slices share, however the ranks are numbered.
        return hash((self.layout.shape, len(self.numbering), self.numbering.largest()))

    def key(self) -> tuple[object, ...]:
        """Return a tuple of C types that equals another layout's if the layouts are equal."""
        return (self.layout.shape, self._ordered_slices().tobytes())

    # ------------------------------------------------------------------ queries

    @property
    def slices(self) -> int:
        """The number of slices."""
        return len(self.numbering) // self.layout.size

    def coordinates(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinates of ``rank`` in its slice, None if it is in no slice."""
        position = self.numbering.position(rank)
        if position is None:
            return None
        return tuple(dim.coordinate(position) for dim in self.layout.dims)

    def number_of(self, rank: int) -> int | None:
        """Return the number of the slice that ``rank`` is in, None if it is in no slice."""
        position = self.numbering.position(rank)
        return None if position is None else self._slice_dim().coordinate(position)

    def slice_at(self, number: int) -> IndexArray:
        """Return the ranks of slice ``number``, int64, in the layout's shape."""
        return self.numbering.take(self.layout.shifted(self._slice_dim().offset(number)).indices())

    def rank_at(self, number: int, place: int) -> int:
        """Return the rank at ``place``, in C order, of slice ``number``; make no array."""
        position = self._slice_dim().offset(number) + join(self.layout.dims).offset(place)
        return int(self.numbering.ranks[position])

    def slice_of(self, rank: int) -> IndexArray | None:
        """Return the ranks of the slice that ``rank`` is in, in the layout's shape, or None."""
        number = self.number_of(rank)
        return None if number is None else self.slice_at(number)

    def whole(self) -> IndexArray:
        """Return all slices, int64, shape (slices, *shape)."""
        return self.numbering.take(Layout((self._slice_dim(), *self.layout.dims)).indices())

    def _slice_dim(self) -> Dim:
        """Return the dim that numbers the slices: the layout's complement, as one dim."""
        return join(self.layout.complement(len(self.numbering)).dims)

    def _ordered_slices(self) -> IndexArray:
        whole = self.whole().reshape(self.slices, -1)
        return whole[np.argsort(whole[:, 0])]

    # ------------------------------------------------------------------ derived layouts

    def with_layout(self, layout: Layout) -> RankLayout:
        """Return another layout over the same numbering."""
        return RankLayout(self.numbering, layout)

    def split(self, position: int, sizes: Sequence[int]) -> RankLayout:
        """Return the layout with the dim at ``position`` replaced by dims of ``sizes``.

        If ``Dim.split`` cannot do that, the ranks are renumbered in the order of the slices, which
        takes memory for all of them.
        """
        try:
            return self.with_layout(self.layout.split(position, sizes))
        except ValueError:
            if math.prod(sizes) != self.layout.shape[position] or min(sizes) < 1:
                raise
        numbering = RankNumbering.of(self.whole(), "mesh")
        slices = Layout.row_major(self.layout.shape)
        return RankLayout(numbering, slices.split(position, sizes))


def _first_repeated(ranks: IndexArray) -> int | None:
    """Return the smallest repeated rank, None if all are distinct."""
    if int(ranks.max()) < 8 * ranks.size:  # dense, as a job's ranks: no need to sort
        seen = np.zeros(int(ranks.max()) + 1, np.bool_)
        seen[ranks] = True
        if np.count_nonzero(seen) == ranks.size:
            return None
    ordered = np.sort(ranks)
    repeated = ordered[:-1][np.diff(ordered) == 0]
    return int(repeated[0]) if repeated.size else None
