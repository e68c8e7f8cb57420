"""The arithmetic from coordinates to indices: sizes and strides, in pure integers.

A layout is a mixed-radix number system. Each dim is a sequence of digits, each digit a size and a
stride. A plain dim has one digit; a dim flattened from dims that are not neighbours has several.
The digits of a layout never overlap: sorted by stride, each stride is a multiple of the previous
digit's span. So an index belongs to at most one coordinate. The conversion in either direction
costs a few integer operations, whatever the number of indices.

Layouts that are closed under selection, permutation, grouping and complement are CuTe's idea
(NVIDIA CUTLASS, "CuTe Layout Algebra"), which calls flattening grouping of modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index as to_int

import numpy as np
import numpy.typing as npt

from transport._checks import to_whole_number, to_whole_numbers

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a mixed-radix number: ``size`` values, ``stride`` apart. Size 1 never occurs."""

    size: int
    stride: int

    @property
    def span(self) -> int:
        """The number of indices that the digit covers; divides the next digit's stride."""
        return self.size * self.stride


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a layout: its digits, the most significant first, merged as far as possible.

    Two dims that map every coordinate to the same index are equal.
    """

    digits: tuple[Digit, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Dim:
        """Return the dim with digits ``(size, stride)``, the most significant first.

        Raises ValueError unless sizes and strides are at least 1.
        """
        digits: list[Digit] = []
        for pair in pairs:
            size, stride = map(to_int, pair)
            if size < 1 or stride < 1:
                raise ValueError(
                    f"a dim needs size >= 1 and stride >= 1, got size {size} and stride {stride}"
                )
            if size == 1:
                continue
            if digits and digits[-1].stride == size * stride:
                digits[-1] = Digit(digits[-1].size * size, stride)
            else:
                digits.append(Digit(size, stride))
        return cls(tuple(digits))

    @property
    def size(self) -> int:
        """The number of coordinates."""
        return math.prod(digit.size for digit in self.digits)

    def offset(self, coordinate: int) -> int:
        """Return the offset of ``coordinate`` (0 to size - 1) in the index."""
        total = 0
        for digit in reversed(self.digits):
            coordinate, value = divmod(coordinate, digit.size)
            total += value * digit.stride
        return total

    def coordinate(self, index: int) -> int:
        """Return this dim's coordinate in ``index``, ignoring the digits of other dims."""
        result = 0
        for digit in self.digits:
            result = result * digit.size + index // digit.stride % digit.size
        return result

    def offsets(self) -> IndexArray:
        """Return the offsets of all coordinates, int64, shape (size,)."""
        result = np.zeros(1, np.int64)
        for digit in self.digits:
            values = np.arange(digit.size, dtype=np.int64) * digit.stride
            result = np.add.outer(result, values).ravel()
        return result

    def split(self, sizes: Sequence[int]) -> tuple[Dim, ...]:
        """Return dims of ``sizes`` that together count through this dim, the slowest first.

        Raises ValueError when the product of ``sizes`` is not this dim's size, or when a boundary
        between two sizes does not divide a digit. For example, digits of 4 and 6 values split as
        (8, 3), but not as (6, 4).
        """
        if math.prod(sizes) != self.size or min(sizes, default=1) < 1:
            raise ValueError(
                f"sizes {tuple(sizes)} have the product {math.prod(sizes)}, expected sizes >= 1"
                f" with the product {self.size}"
            )
        parts: list[Dim] = []
        remaining = list(self.digits)
        for size in reversed(sizes):
            taken: list[tuple[int, int]] = []
            wanted = size
            while wanted > 1:
                digit = remaining.pop()
                if wanted % digit.size == 0:
                    taken.append((digit.size, digit.stride))
                    wanted //= digit.size
                elif digit.size % wanted == 0:
                    taken.append((wanted, digit.stride))
                    remaining.append(Digit(digit.size // wanted, digit.stride * wanted))
                    wanted = 1
                else:
                    raise ValueError(
                        f"a dim of digits (size, stride) {self.pairs()} does not split into"
                        f" {tuple(sizes)}: {wanted} and {digit.size} do not divide one another"
                    )
            parts.append(Dim.of(reversed(taken)))
        return tuple(reversed(parts))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the digits as plain (size, stride) pairs."""
        return tuple((digit.size, digit.stride) for digit in self.digits)


def join(dims: Iterable[Dim]) -> Dim:
    """Return the dim that counts through ``dims``, of which the first is the slowest."""
    return Dim.of(pair for dim in dims for pair in dim.pairs())


@dataclass(frozen=True, slots=True)
class Layout:
    """Dims, outermost first, and an ``origin``: the index of the coordinate that is 0 everywhere.

    Every operation returns a layout. Dims are named by position; negative positions count from the
    end. Raises ValueError for overlapping dims (two coordinates with one index). All operations
    raise ValueError for unknown or repeated positions, and TypeError for a value that is not an
    integer.
    """

    dims: tuple[Dim, ...]
    origin: int = 0

    def __post_init__(self) -> None:
        span = 1
        for digit in sorted(self._digits(), key=lambda digit: digit.stride):
            if digit.stride % span:
                raise ValueError(
                    f"dims {[dim.pairs() for dim in self.dims]} (size, stride) overlap: stride"
                    f" {digit.stride} is not a multiple of {span}, the span of the digits inside it"
                )
            span = digit.span

    @classmethod
    def row_major(cls, sizes: Sequence[int], origin: int = 0) -> Layout:
        """Return the layout of a C-ordered array of shape ``sizes``, which begins at ``origin``.

        Raises ValueError for a size below 1.
        """
        shape = to_whole_numbers(sizes, "sizes")
        if min(shape, default=1) < 1:
            raise ValueError(f"sizes {tuple(shape)} must all be at least 1")
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return cls.from_strides(shape, strides, origin)

    @classmethod
    def from_strides(cls, sizes: Sequence[int], strides: Sequence[int], origin: int = 0) -> Layout:
        """Return the layout with one digit per dim, of ``sizes`` and ``strides`` (in indices).

        Raises ValueError when their lengths differ, for a value below 1, and for dims that overlap.
        """
        shape, steps = to_whole_numbers(sizes, "sizes"), to_whole_numbers(strides, "strides")
        if len(shape) != len(steps):
            raise ValueError(f"sizes {tuple(shape)} and strides {tuple(steps)} differ in length")
        return cls(tuple(Dim.of([pair]) for pair in zip(shape, steps, strict=True)), origin)

    # ------------------------------------------------------------------ queries

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims' sizes."""
        return tuple(dim.size for dim in self.dims)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """The number of coordinates, and of indices."""
        return math.prod(self.shape)

    def index(self, coordinates: Sequence[int]) -> int:
        """Return the index of ``coordinates``; raise ValueError when one is out of range."""
        coordinates = to_whole_numbers(coordinates, "coordinates")
        if len(coordinates) != self.ndim or not all(
            0 <= c < size for c, size in zip(coordinates, self.shape, strict=True)
        ):
            raise ValueError(
                f"coordinates {tuple(coordinates)} do not lie in the shape {self.shape}"
            )
        return self.origin + sum(
            dim.offset(c) for dim, c in zip(self.dims, coordinates, strict=True)
        )

    def coordinates(self, index: int) -> tuple[int, ...] | None:
        """Return the coordinates of ``index``, or None when the layout does not reach it."""
        distance = index - self.origin
        found = tuple(dim.coordinate(distance) for dim in self.dims)
        return found if self.index(found) == index else None

    def __contains__(self, index: int) -> bool:
        return self.coordinates(index) is not None

    def indices(self) -> IndexArray:
        """Return all indices, int64, as an array of this layout's shape."""
        result = np.array(self.origin, np.int64)
        for dim in self.dims:
            result = np.add.outer(result, dim.offsets())
        return result

    # ------------------------------------------------------------------ derived layouts

    def select(self, positions: Sequence[int]) -> Layout:
        """Return the layout of the dims at ``positions``, in that order; the others stay at 0."""
        return Layout(tuple(self.dims[i] for i in self._positions(positions)), self.origin)

    def at(self, position: int, coordinate: int) -> Layout:
        """Return the layout without the dim at ``position``, which stays at ``coordinate``.

        Raises ValueError for a coordinate out of range.
        """
        coordinate = to_whole_number(coordinate, "coordinate")
        (i,) = self._positions([position])
        if not 0 <= coordinate < self.dims[i].size:
            raise ValueError(
                f"coordinate {coordinate} of dim {position} does not lie in 0 to"
                f" {self.dims[i].size - 1}"
            )
        origin = self.origin + self.dims[i].offset(coordinate)
        return Layout(self.dims[:i] + self.dims[i + 1 :], origin)

    def shifted(self, distance: int) -> Layout:
        """Return the layout with ``distance`` added to every index."""
        return Layout(self.dims, self.origin + distance)

    def permute(self, order: Sequence[int]) -> Layout:
        """Return the layout with its dims in ``order``, as in ``numpy.transpose``.

        Raises ValueError unless ``order`` names each dim once.
        """
        positions = self._positions(order)
        if len(positions) != self.ndim:
            raise ValueError(f"order {tuple(order)} must name each of the {self.ndim} dims once")
        return Layout(tuple(self.dims[i] for i in positions), self.origin)

    def flatten(self, positions: Sequence[int] | None = None) -> Layout:
        """Return the layout with the dims at ``positions`` (default: all) joined, in that order.

        The dims need not be neighbours. The new dim takes the place of the outermost joined dim.
        """
        chosen = self._positions(range(self.ndim) if positions is None else positions)
        dims: list[Dim] = [dim for i, dim in enumerate(self.dims) if i not in chosen]
        place = min(chosen, default=0)
        dims.insert(place, join(self.dims[i] for i in chosen))
        return Layout(tuple(dims), self.origin)

    def split(self, position: int, sizes: Sequence[int]) -> Layout:
        """Return the layout with the dim at ``position`` split into ``sizes``, the slowest first.

        Raises ValueError where ``Dim.split`` does.
        """
        (i,) = self._positions([position])
        parts = self.dims[i].split(to_whole_numbers(sizes, "sizes"))
        return Layout(self.dims[:i] + parts + self.dims[i + 1 :], self.origin)

    def concatenate(self, *others: Layout) -> Layout:
        """Return the layout of this one's dims and those of ``others``; its origin is their sum.

        Raises ValueError when dims overlap.
        """
        layouts = (self, *others)
        return Layout(
            tuple(dim for layout in layouts for dim in layout.dims),
            sum(layout.origin for layout in layouts),
        )

    def complement(self, size: int) -> Layout:
        """Return the layout that counts the copies of this one which cover ``size`` indices.

        Each index below ``size`` is the sum of one index of the complement and one of this layout
        (without its origin), in one way only. Raises ValueError when copies cannot cover them, and
        for a ``size`` below 1.
        """
        if to_whole_number(size, "size") < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        pairs: list[tuple[int, int]] = []
        span = 1
        for digit in sorted(self._digits(), key=lambda digit: digit.stride):
            pairs.append((digit.stride // span, span))
            span = digit.span
        if size % span:
            raise ValueError(
                f"{size} indices are not covered by copies of a layout that spans {span}"
            )
        pairs.append((size // span, span))
        return Layout(tuple(Dim.of([pair]) for pair in reversed(pairs) if pair[0] > 1))

    def covers(self, dim: Dim) -> bool:
        """Return whether ``dim`` is inside this layout: each of its steps is a step of its dims."""
        ordered = sorted(self._digits(), key=lambda digit: -digit.stride)
        whole = Dim.of((digit.size, digit.stride) for digit in ordered)
        return all(
            any(
                part.stride % digit.stride == 0 and digit.span % part.span == 0
                for digit in whole.digits
            )
            for part in dim.digits
        )

    def _digits(self) -> list[Digit]:
        return [digit for dim in self.dims for digit in dim.digits]

    def _positions(self, positions: Iterable[int]) -> list[int]:
        """Return ``positions`` counted from 0; raise ValueError for an unknown or repeated one."""
        result: list[int] = []
        for i in to_whole_numbers(positions, "positions"):
            if not -self.ndim <= i < self.ndim:
                raise ValueError(f"dim {i} does not exist in a layout of {self.ndim} dims")
            if i % self.ndim in result:
                raise ValueError(f"dim {i} is named twice")
            result.append(i % self.ndim)
        return result
