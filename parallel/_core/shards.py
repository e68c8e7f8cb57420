"""Sharded arrays: their layout, and the collectives that gather them and reduce gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlib import ProcessGroup, ReduceOp, Work
from meshlib.sharding import block
from parallel._arrays import Array, namespace, placement
from parallel._core.buckets import allocate, put

DIRECT_BYTES = 256 << 10
"""The minimum size of an array that is gathered and reduced in place, by its own collective.

Smaller arrays share a collective: they are packed rank by rank, at the cost of a copy.
"""


class ShardLayout:
    """The layout of arrays, each split along dim 0 over ``size`` ranks, in one flat array.

    The flat array has the whole arrays of ``shapes`` in sequence, then the parts of the ``packed``
    arrays, rank by rank. ``direct`` and ``packed`` are indices in ``shapes``.
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
        """The number of elements in the packed parts of each rank."""
        return [end - begin for begin, end in itertools.pairwise(self._packed_ends)]

    @property
    def count(self) -> int:
        """The number of elements in the flat array."""
        return self._packed_ends[-1]

    def whole(self, flat: Array, i: int) -> Array:
        """Return whole array ``i`` as a view."""
        return flat[self._begins[i] : self._begins[i + 1]].reshape(self.shapes[i])

    def parts(self, flat: Array, i: int) -> list[Array]:
        """Return each rank's part of whole array ``i`` as flat views."""
        begin = self._begins[i]
        return [flat[begin + start : begin + stop] for start, stop in self._rows[i]]

    def packed_rows(self, flat: Array) -> list[Array]:
        """Return each rank's packed parts as views."""
        return [flat[begin:end] for begin, end in itertools.pairwise(self._packed_ends)]

    def in_row(self, row: Array, rank: int) -> list[tuple[int, Array]]:
        """Return (index of the array, flat view) for each part in the packed row of ``rank``."""
        found: list[tuple[int, Array]] = []
        begin = 0
        for i in self.packed:
            start, stop = self._rows[i][rank]
            found.append((i, row[begin : begin + stop - start]))
            begin += stop - start
        return found

    def part_sizes(self, rank: int) -> list[int]:
        """Return the number of elements of each array on ``rank``."""
        return [stop - start for start, stop in (rows[rank] for rows in self._rows)]


def rows_of(shape: Sequence[int], size: int, rank: int) -> slice:
    """Return the rows of an array of ``shape`` on rank ``rank`` of ``size``, as in a Sharding."""
    return slice(*block(shape[0], [size], [rank]))


def row_counts(length: int, size: int) -> list[int]:
    """Return the number of rows on each of ``size`` ranks, which share ``length`` rows."""
    rows = [rows_of((length,), size, rank) for rank in range(size)]
    return [own.stop - own.start for own in rows]


def _ends(shape: Sequence[int], size: int, rank: int) -> tuple[int, int]:
    rows, width = rows_of(shape, size, rank), math.prod(shape[1:])
    return rows.start * width, rows.stop * width


class Pool:
    """A pool of free flat arrays for gathered parameters and their gradients.

    Allocating an array for each use would cost more than filling it, because the system zeroes
    pages, and ranks exchange messages for symmetric memory. All ranks must take and give in the
    same order, so that they allocate or reuse the same array.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[str, tuple[str, str]], list[Array]] = {}

    def take(self, group: ProcessGroup, count: int, like: Array, dtype: Any) -> Array:
        """Return a flat array of at least ``count`` elements, symmetric on ``group`` if possible.

        If all free arrays are too small, they are dropped. This limits the pool to the maximum
        number of arrays in use at a time.
        """
        model = namespace(like).empty(0, dtype=dtype)
        free = self._free.setdefault((group.id, placement(model)), [])
        fitting = [array for array in free if array.size >= count]
        if not fitting:
            free.clear()
            return allocate(count, model.dtype, namespace(like), group)
        best = min(fitting, key=lambda array: array.size)
        free[:] = [array for array in free if array is not best]
        return best

    def give(self, group: ProcessGroup, array: Array) -> None:
        """Return an array to the pool; it and its views must not be used afterwards."""
        self._free.setdefault((group.id, placement(array)), []).append(array)


class ShardGather:
    """A gather of whole arrays, in progress or complete; ``release`` returns their memory.

    ``arrays`` are this rank's parts over ``group``; they are cast to ``dtype`` first.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        arrays: Sequence[Array],
        group: ProcessGroup,
        dtype: np.dtype[Any],
        pool: Pool,
    ) -> None:
        self._group, self._pool = group, pool
        self._layout = ShardLayout(shapes, dtype.itemsize, group.size())
        self._works: list[Work[Any]] = []
        self._flat: Array | None = None
        if group.size() == 1:
            self._wholes = [
                array.astype(dtype, copy=False).reshape(shape)
                for array, shape in zip(arrays, shapes, strict=True)
            ]
            return
        me = group.rank()
        flat = self._flat = pool.take(group, self._layout.count, arrays[0], dtype)
        self._wholes = [self._layout.whole(flat, i) for i in range(len(shapes))]
        if self._layout.packed:
            rows = self._layout.packed_rows(flat)
            for i, target in self._layout.in_row(rows[me], me):
                target[...] = arrays[i].reshape(-1)
            self._works.append(group.all_gather(rows, rows[me], async_op=True))
        for i in self._layout.direct:
            parts = self._layout.parts(flat, i)
            parts[me][...] = arrays[i].reshape(-1)
            self._works.append(group.all_gather(parts, parts[me], async_op=True))

    def finish(self) -> list[Array]:
        """Wait for the whole arrays and return them."""
        for work in self._works:
            work.wait()
        if self._works and self._layout.packed:
            assert self._flat is not None
            by_place = {i: self._layout.parts(self._flat, i) for i in self._layout.packed}
            for rank, row in enumerate(self._layout.packed_rows(self._flat)):
                for i, part in self._layout.in_row(row, rank):
                    by_place[i][rank][...] = part
        self._works = []
        return self._wholes

    def release(self) -> None:
        """Return the memory to the pool; the whole arrays must not be used afterwards."""
        self._wholes = []
        if self._flat is not None:
            self._pool.give(self._group, self._flat)
            self._flat = None


class GradientBuffer:
    """Flat memory for the gradients of whole arrays, of one dtype.

    Its ``views`` have these ``shapes``. ``release`` returns the memory.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        like: Array,
        group: ProcessGroup,
        dtype: Any,
        pool: Pool,
    ) -> None:
        self.layout: ShardLayout = ShardLayout(shapes, np.dtype(dtype).itemsize, group.size())
        self._group, self._pool = group, pool
        self.flat: Array = pool.take(group, self.layout.count, like, dtype)
        self.views: list[Array] = [self.layout.whole(self.flat, i) for i in range(len(shapes))]

    def collect(self, grads: Sequence[Array | None]) -> None:
        """Copy gradients into the buffer, unless they are its views. None means zeros."""
        for view, grad in zip(self.views, grads, strict=True):
            put(view, grad)

    def release(self) -> None:
        """Return the memory to the pool."""
        self.views = []
        self._pool.give(self._group, self.flat)


class GradientReduction:
    """Averages the gradients in ``buffer``; each rank gets the averages of its parts.

    Reduce-scatters over ``group``, then all-reduces the parts over ``replicas``, if any.
    """

    def __init__(
        self, buffer: GradientBuffer, group: ProcessGroup, replicas: ProcessGroup | None
    ) -> None:
        self._buffer, self._replicas = buffer, replicas
        layout, flat, me = buffer.layout, buffer.flat, group.rank()
        sizes = layout.part_sizes(me)
        self._packed = sum(sizes[i] for i in layout.packed)
        self._result: Array = namespace(flat).empty(sum(sizes), dtype=flat.dtype)
        self._grads: dict[int, Array] = dict(layout.in_row(self._result[: self._packed], me))
        self._works: list[Work[Any]] = []
        if layout.packed:
            rows = layout.packed_rows(flat)
            for rank, row in enumerate(rows):
                for i, target in layout.in_row(row, rank):
                    target[...] = layout.parts(flat, i)[rank]
            self._reduce(group, self._result[: self._packed], rows)
        begin = self._packed
        for i in layout.direct:
            self._grads[i] = self._result[begin : begin + sizes[i]]
            begin += sizes[i]
            self._reduce(group, self._grads[i], layout.parts(flat, i))

    def _reduce(self, group: ProcessGroup, output: Array, inputs: list[Array]) -> None:
        if group.size() == 1:
            output[...] = inputs[0]
            return
        self._works.append(group.reduce_scatter(output, inputs, ReduceOp.AVG, async_op=True))

    def scattered(self, earlier: Array | None = None) -> Array:
        """Wait for this rank's parts, and give the buffer's memory back to the pool.

        Adds ``earlier``, the gradients that a pass without replicas left for these parts. Then
        starts the average over the replicas, if any. Returns the parts' gradients, flat.
        """
        self._wait()
        self._buffer.release()
        if earlier is not None:
            self._result += earlier
        if self._replicas is not None and self._replicas.size() > 1:
            work = self._replicas.all_reduce(self._result, ReduceOp.AVG, async_op=True)
            self._works.append(work)
        return self._result

    def finish(self) -> list[Array]:
        """Wait for the averages; return each of this rank's parts, flat."""
        self._wait()
        return [self._grads[i] for i in range(len(self._grads))]

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
