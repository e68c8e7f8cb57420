"""The measured cases: one collective each, on float32, with a known result.

A case holds the arrays and the right result; the library makes the call. Element ``i`` of rank
``r``'s input is ``i % 251 + r``, a small integer, so sums and their checks are exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Empty = Callable[[int, int], Floats]
"""A function that makes an array of float32, in the memory that a library needs. The arguments are
the number of elements, and the largest number of any rank.
"""

ROOT = 0
COPY = "copy"
"""The case that is not a collective."""

# Slices of the list of all ranks.
ALL, ROOT_ALONE, ALL_BUT_ROOT, FIRST_TWO = slice(None), slice(1), slice(1, None), slice(2)

_PERIOD = 251
_TILE_COUNT = _PERIOD * 256
_PATTERN: Floats = (np.arange(_TILE_COUNT + _PERIOD) % _PERIOD).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PatternSlice:
    """``count`` values of the pattern, from ``position`` on, times ``scale``, plus ``shift``."""

    position: int
    count: int
    scale: int = 1
    shift: int = 0

    def tile(self) -> Floats:
        """Return the first values, at most one tile; later values repeat the tile."""
        start = self.position % _PERIOD
        count = min(self.count, _TILE_COUNT)
        return _PATTERN[start : start + count] * np.float32(self.scale) + np.float32(self.shift)


def _pieces(array: Floats, runs: Sequence[PatternSlice]) -> list[tuple[Floats, Floats]]:
    """Return cache-sized pieces of ``array``, each with its values from the successive ``runs``."""
    pieces: list[tuple[Floats, Floats]] = []
    start = 0
    for run in runs:
        tile, stop = run.tile(), start + run.count
        for at in range(start, stop, _TILE_COUNT):
            end = min(at + _TILE_COUNT, stop)
            pieces.append((array[at:end], tile[: end - at]))
        start = stop
    assert start == array.size
    return pieces


class Case(ABC):
    """One collective at one size on one rank of ``size``.

    ``nbytes`` is the size of each rank's input (of the root's for a broadcast and a scatter),
    rounded up to whole elements for each rank. If an input or output has a part for each rank,
    ``each`` is the number of elements of one part; else that of the input.
    """

    name: ClassVar[str]
    is_sized: ClassVar[bool] = True
    """True if the case is measured at several sizes."""

    has_output: ClassVar[bool] = False
    """True if the result is in another array, and the input is not changed."""

    splits: ClassVar[bool] = False
    """True if the input has a part for each rank."""
    joins: ClassVar[bool] = False
    """True if the output has a part for each rank."""

    givers: ClassVar[slice] = ALL
    """The ranks whose input matters to the result."""
    takers: ClassVar[slice] = ALL
    """The ranks with a result. In a case in place, other ranks also have an array."""

    def __init__(self, nbytes: int, rank: int, size: int, empty: Empty) -> None:
        parts = size if self.splits else 1
        self.each: int = max(1, -(-nbytes // (4 * parts)))
        self.rank = rank
        self.size = size
        givers = self.givers if self.has_output else ALL
        self.input: Floats = self._allocate(parts, givers, empty)
        self.output: Floats = self.input
        if self.has_output:
            self.output = self._allocate(size if self.joins else 1, self.takers, empty)
        self._source = _pieces(self.input, [PatternSlice(0, self.input.size, shift=rank)])
        self.clear()

    def _allocate(self, parts: int, ranks: slice, empty: Empty) -> Floats:
        """Return an array of ``parts`` parts, on ``ranks``; an empty array on other ranks."""
        count = parts * self.each
        return empty(count if self.rank in range(self.size)[ranks] else 0, count)

    @classmethod
    def traffic(cls, nbytes: int, size: int) -> tuple[float, float]:
        """Return S and the bus factor of nccl-tests' ``PERFORMANCE.md``.

        Algorithm bandwidth is S over the time. Bus bandwidth is algorithm bandwidth times the
        factor. It is comparable with the hardware's, for any collective and number of ranks.
        """
        gathered = nbytes * size if cls.joins and not cls.splits else nbytes
        return float(gathered), (size - 1) / size if cls.joins or cls.splits else 1.0

    @classmethod
    def moved(cls, nbytes: int, size: int) -> int:
        """Return the least bytes that all ranks together must read and write.

        Each input is read once and each result is written once, as if all ranks could access all
        inputs and sums stayed in registers. A sum in place on all ranks reads and writes each of
        the ``size`` arrays once.
        """
        return nbytes * len(range(size)[cls.givers]) + cls.written(nbytes, size)

    @classmethod
    def written(cls, nbytes: int, size: int) -> int:
        """Return the written bytes of ``moved``: the results of all ranks."""
        each = nbytes * (size if cls.joins else 1) // (size if cls.splits else 1)
        return each * len(range(size)[cls.takers])

    @classmethod
    def memory(cls, nbytes: int, size: int) -> int:
        """Return the bytes of the arrays of all ranks."""
        if not cls.has_output:
            return nbytes * size
        return cls.moved(nbytes, size)

    def clear(self) -> None:
        """Fill the input, and the output with values that no call writes."""
        self.output.fill(np.nan)
        self._fill_input()

    def reset(self) -> None:
        """Restore the input, if a call changes it."""
        if not self.has_output:
            self._fill_input()

    def _fill_input(self) -> None:
        for piece, values in self._source:
            np.copyto(piece, values)

    def parts(self, array: Floats) -> list[Floats]:
        """Return ``array``'s part for each rank."""
        return [array[rank * self.each : (rank + 1) * self.each] for rank in range(self.size)]

    @abstractmethod
    def expected(self) -> list[PatternSlice] | None:
        """Return the expected result; None if this rank gets no result."""

    def is_right(self, result: Floats) -> bool:
        """Return whether ``result`` is the right result of a call on this rank."""
        expected = self.expected()
        return expected is None or all(
            np.array_equal(piece, values) for piece, values in _pieces(result, expected)
        )


class AllReduceCase(Case):
    """An all-reduce in place: sums."""

    name = "all_reduce"

    @classmethod
    def traffic(cls, nbytes: int, size: int) -> tuple[float, float]:
        return float(nbytes), 2 * (size - 1) / size

    def expected(self) -> list[PatternSlice] | None:
        return [PatternSlice(0, self.each, self.size, sum(range(self.size)))]


class BroadcastCase(Case):
    """A broadcast from the root, in place."""

    name = "broadcast"
    givers = ROOT_ALONE
    takers = ALL_BUT_ROOT

    def expected(self) -> list[PatternSlice] | None:
        return [PatternSlice(0, self.each, shift=ROOT)]


class ReduceCase(Case):
    """A reduce in place on the root: sums; the other ranks' arrays are then undefined."""

    name = "reduce"
    takers = ROOT_ALONE

    def expected(self) -> list[PatternSlice] | None:
        if self.rank != ROOT:
            return None
        return [PatternSlice(0, self.each, self.size, sum(range(self.size)))]


class AllGatherCase(Case):
    """An all-gather into one array."""

    name = "all_gather"
    has_output = True
    joins = True

    def expected(self) -> list[PatternSlice] | None:
        return [PatternSlice(0, self.each, shift=rank) for rank in range(self.size)]


class GatherCase(AllGatherCase):
    """A gather into one array of the root."""

    name = "gather"
    takers = ROOT_ALONE

    def expected(self) -> list[PatternSlice] | None:
        return super().expected() if self.rank == ROOT else None


class ReduceScatterCase(Case):
    """A reduce-scatter: sums of one array's parts."""

    name = "reduce_scatter"
    has_output = True
    splits = True

    def expected(self) -> list[PatternSlice] | None:
        return [PatternSlice(self.rank * self.each, self.each, self.size, sum(range(self.size)))]


class ScatterCase(ReduceScatterCase):
    """A scatter of the parts of the root's array."""

    name = "scatter"
    givers = ROOT_ALONE

    def expected(self) -> list[PatternSlice] | None:
        return [PatternSlice(self.rank * self.each, self.each, shift=ROOT)]


class AllToAllCase(Case):
    """An all-to-all of equal parts of one array."""

    name = "all_to_all"
    has_output = True
    splits = True
    joins = True

    def expected(self) -> list[PatternSlice] | None:
        return [
            PatternSlice(self.rank * self.each, self.each, shift=rank) for rank in range(self.size)
        ]


class PingPongCase(Case):
    """A message from rank 0 to rank 1 and back; the other ranks do nothing.

    Rank 1 answers with its own input, not with the received array, so that both ways are checked.
    """

    name = "ping_pong"
    has_output = True
    givers = FIRST_TWO
    takers = FIRST_TWO

    @classmethod
    def traffic(cls, nbytes: int, size: int) -> tuple[float, float]:
        return 2.0 * nbytes, 1.0

    def expected(self) -> list[PatternSlice] | None:
        return [PatternSlice(0, self.each, shift=1 - self.rank)] if self.rank < 2 else None


class BarrierCase(Case):
    """A barrier, which moves no data."""

    name = "barrier"
    is_sized = False

    @classmethod
    def traffic(cls, nbytes: int, size: int) -> tuple[float, float]:
        return 0.0, 0.0

    def expected(self) -> list[PatternSlice] | None:
        return None


class CopyCase(Case):
    """A copy of the input on all ranks at once, which measures the memory; not a collective."""

    name = COPY
    has_output = True

    @classmethod
    def traffic(cls, nbytes: int, size: int) -> tuple[float, float]:
        return float(2 * nbytes * size), 1.0

    def expected(self) -> list[PatternSlice] | None:
        return [PatternSlice(0, self.each, shift=self.rank)]

    def copy(self) -> None:
        """Copy the input to the output."""
        np.copyto(self.output, self.input)


CASES: dict[str, type[Case]] = {
    case.name: case
    for case in (
        AllReduceCase,
        BroadcastCase,
        AllGatherCase,
        ReduceScatterCase,
        AllToAllCase,
        ReduceCase,
        GatherCase,
        ScatterCase,
        BarrierCase,
        PingPongCase,
        CopyCase,
    )
}
COLLECTIVES = [name for name in CASES if name != COPY]

Bound = Callable[[], Any]
"""One call of a case in a library, ready to be timed."""
