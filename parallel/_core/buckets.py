"""Gradient buckets: flat buffers, each with the gradients of several parameters.

A single all-reduce of a bucket is faster than one for each gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from parallel._arrays import Array, Namespace, namespace, pieces, placement
from parallel._core.assignment import assign_buckets


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """A gradient's name in the model, its shape, dtype and device, independent of its values."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: str = "cpu"
    library: Namespace = np
    parameter: Any = None
    """The parameter as returned by ``GradBucket.parameters``."""

    @classmethod
    def of(cls, name: str, data: Array, parameter: Any) -> GradientSpec:
        """Return the spec of the gradient of ``data``, the array of ``parameter``."""
        device = placement(data)[1]
        return cls(name, data.shape, data.dtype, device, namespace(data), parameter)

    @property
    def placement(self) -> tuple[str, str]:
        """(dtype name, device). Only gradients with equal placement share a bucket."""
        return self.dtype.name, self.device

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.dtype.itemsize


class GradientOwner(Protocol):
    """The wrapper that owns the gradients of a reducer."""

    def accumulated(self, number: int) -> Array | None:
        """Return the gradient that earlier passes have accumulated, or None."""
        ...

    def rehome(self, views: Mapping[int, Array]) -> None:
        """From now on, store gradient ``n`` in ``views[n]``, a view of a bucket."""
        ...

    def deliver(self, averages: Mapping[int, Array]) -> None:
        """Receive a bucket's averages by number. The arrays are views of the bucket."""
        ...


class Bucket:
    """A flat buffer that holds several gradients in sequence.

    ``numbers`` are the gradients' numbers in the reducer; ``views`` are their parts of ``buffer``
    by number, in their shapes. ``pending`` counts the gradients that the current backward pass has
    not completed. ``residual`` has the rounding errors of reductions, for error feedback.

    The buffer is in the symmetric memory of ``group``, so all members must make equal buckets.
    """

    def __init__(
        self,
        index: int,
        numbers: Sequence[int],
        specs: Sequence[GradientSpec],
        group: ProcessGroup,
    ) -> None:
        first = specs[0]
        self.index = index
        self.numbers: list[int] = list(numbers)
        self.specs: list[GradientSpec] = list(specs)
        self.size: int = sum(spec.size for spec in specs)
        self.buffer: Array = allocate(self.size, first.dtype, first.library, group)
        # Zeros for gradients that never arrive. Each pass fills in the missing trained ones.
        self.buffer.fill(0)
        self.views: dict[int, Array] = self._by_number(self.buffer)
        self.pending: int = len(self.numbers)
        self.residual: npt.NDArray[np.float32] | None = None
        self._before: dict[int, Array] = {}

    def keep_residual(self, known: Mapping[int, Array]) -> None:
        """Start error feedback for this bucket's reductions.

        ``known`` has existing residuals by the gradients' numbers.
        """
        self.residual = np.zeros(self.size, np.float32)
        for number, part in self.residuals().items():
            if number in known:
                part[...] = known[number]

    def residuals(self) -> dict[int, Array]:
        """Return the views of ``residual`` by the gradients' numbers."""
        return {} if self.residual is None else self._by_number(self.residual)

    def remember(self, unused: Collection[int]) -> None:
        """Save the residuals of ``unused`` gradients before a reduction that changes them."""
        self._before = {n: part.copy() for n, part in self.residuals().items() if n in unused}

    def restore(self, absent: Collection[int]) -> None:
        """Restore the saved residuals of ``absent`` gradients, whose averages are dropped.

        They must have been in ``unused`` of ``remember``.
        """
        for number, part in self.residuals().items():
            if number in absent:
                part[...] = self._before[number]
        self._before = {}

    def split(self, buffer: Array) -> list[Array]:
        """Return views of ``buffer`` (flat, of this bucket's size) in the gradients' shapes."""
        return pieces(buffer, (spec.shape for spec in self.specs))

    def _by_number(self, buffer: Array) -> dict[int, Array]:
        return dict(zip(self.numbers, self.split(buffer), strict=True))


def put(view: Array, grad: Array | None) -> None:
    """Copy a gradient into its ``view`` of a buffer, unless it is the view; None means zeros."""
    if grad is None:
        view.fill(0)
    elif grad is not view:
        view[...] = grad


def allocate(size: int, dtype: Any, library: Namespace, group: ProcessGroup) -> Array:
    """Return a flat array of ``size`` elements of ``dtype`` from ``library``.

    It is in the symmetric memory of ``group`` if the group has any for the library.
    """
    if library is not np or "cpu" not in group.backends or group.size() == 1:
        return library.empty(size, dtype=dtype)
    return group.empty(size, dtype)


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """Options of a reducer: bucket sizes, and the rules about unused parameters."""

    first_bytes: int
    cap_bytes: int
    alone_bytes: float = math.inf
    """Each gradient of at least this size has its own bucket."""
    find_unused_parameters: bool = False
    static_graph: bool = False


class BucketSet:
    """The buckets of the gradients ``specs``.

    ``all`` lists them in the order of reduction. ``where`` maps a gradient's number, which is its
    index in ``specs``, to its bucket.
    """

    def __init__(
        self, specs: Sequence[GradientSpec], group: ProcessGroup, options: ReducerOptions
    ) -> None:
        self._specs = specs
        self._group = group
        self._options = options
        self.all: list[Bucket] = []
        self.where: dict[int, Bucket] = {}

    def build(self, order: Sequence[int]) -> None:
        """Make buckets for the gradients in the expected ``order`` of their numbers.

        Residuals of error feedback are kept. This is a collective, because the buckets are in
        symmetric memory, where they are reduced without a copy.
        """
        compression = self._group.compression
        known = self.residuals()
        self.all = [
            Bucket(index, numbers, [self._specs[number] for number in numbers], self._group)
            for index, numbers in enumerate(self._assign(order))
        ]
        if compression is not None and compression.error_feedback:
            for bucket in self.all:
                if bucket.specs[0].library is np:
                    bucket.keep_residual(known)
        self.where = {number: bucket for bucket in self.all for number in bucket.numbers}

    def agree(self, order: Sequence[int]) -> list[int]:
        """Return group rank 0's ``order``, because the order of arrival may differ by rank."""
        numbers = self._specs[0].library.asarray(order, dtype="int64")
        self._group.broadcast(numbers, group_src=0)
        return numbers.tolist()

    def residuals(self) -> dict[int, Array]:
        """Return the rounding errors for error feedback by the gradients' numbers."""
        return {n: part for bucket in self.all for n, part in bucket.residuals().items()}

    def _assign(self, order: Sequence[int]) -> list[list[int]]:
        options, sizes = self._options, [spec.nbytes for spec in self._specs]
        keys: list[Hashable] = [
            (spec.placement, number if spec.nbytes >= options.alone_bytes else None)
            for number, spec in enumerate(self._specs)
        ]
        groups = assign_buckets(order, sizes, keys, options.first_bytes, options.cap_bytes)
        # A bucket of small gradients from the whole model is complete late. It must be last, or
        # large buckets that are complete would wait for it.
        least = options.alone_bytes
        return sorted(groups, key=lambda numbers: sum(sizes[n] for n in numbers) < least)
