"""Buckets: which gradients are reduced together, and the flat buffers that they share."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

import meshlib
from meshlib import ProcessGroup, ReduceOp, error_feedback
from parallel.arrays import Array, namespace, pieces, written
from parallel.nn.parameter import Parameter

MIB = 1 << 20
FIRST_BUCKET_BYTES = MIB
"""The first bucket is small, so that communication begins early in the backward pass."""

_FEW = 16
"""What is at most this part of a bucket may go with another one than it would fill."""


def cap_in_bytes(bucket_cap_mb: Any) -> int:
    """Return a bucket size given in MiB in bytes.

    Raises TypeError for what is no number, ValueError for one that is not positive and finite.
    """
    if not isinstance(bucket_cap_mb, Real):
        raise TypeError(
            "bucket_cap_mb must be a number (the size of buckets in MiB), got "
            f"{bucket_cap_mb!r} of type {type(bucket_cap_mb).__name__}"
        )
    size = float(bucket_cap_mb)
    if not (size > 0 and math.isfinite(size)):
        raise ValueError(f"bucket_cap_mb must be positive and finite, got {bucket_cap_mb}")
    return int(size * MIB)


def assign_buckets(
    order: Sequence[int],
    nbytes: Sequence[int],
    keys: Sequence[Hashable],
    first_bytes: int,
    cap_bytes: int,
) -> list[list[int]]:
    """Group parameters into buckets.

    Parameters (``order``: their numbers, as gradients are expected) fill one open bucket for each
    key (dtype and device). A key's first bucket is closed once it holds at least ``first_bytes``.
    The others are closed once they hold ``cap_bytes``, as c10d does it, or before a parameter that
    would take them beyond that: else a gradient that is complete waits for a large one that is not.
    A few small ones that come just before that parameter (a layer's bias) go with it: their bucket
    would wait for their layer. A parameter is never split, and one larger than the cap has a bucket
    of its own, but for such small ones. Buckets are returned in the order in which their last
    gradients come, which is the order in which they can be sent off.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    limits: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    few = min(first_bytes, cap_bytes // _FEW)
    for number in order:
        key = keys[number]
        bucket = open_buckets.setdefault(key, [])
        if key in limits and filled[key] + nbytes[number] > cap_bytes:
            small = _count_small([nbytes[each] for each in bucket], few)
            if small < len(bucket):
                begin = len(bucket) - small
                closed.append(bucket[:begin])
                bucket = open_buckets[key] = bucket[begin:]
                filled[key] = sum(nbytes[each] for each in bucket)
        bucket.append(number)
        filled[key] = filled.get(key, 0) + nbytes[number]
        if filled[key] >= limits.get(key, first_bytes):
            closed.append(open_buckets.pop(key))
            filled[key] = 0
            limits[key] = cap_bytes
    place = {number: i for i, number in enumerate(order)}
    return sorted([*closed, *open_buckets.values()], key=lambda bucket: place[bucket[-1]])


def _count_small(sizes: Sequence[int], most: int) -> int:
    """Return how many of the last of ``sizes`` are at most ``most`` together."""
    count, total = 0, 0
    for size in reversed(sizes):
        total += size
        if total > most:
            break
        count += 1
    return count


class Bucket:
    """A flat buffer that holds the gradients of some parameters, one after the other.

    ``numbers`` are the parameters' numbers in the reducer, ``paths`` their names in the model,
    ``views`` the parts of ``buffer`` in their shapes. ``pending`` counts the gradients that have
    not come in this backward pass. With a ``group`` the buffer is in its symmetric memory: all
    members make equal buckets then. ``residual`` is what reductions have rounded away, where that
    is kept.
    """

    def __init__(
        self,
        index: int,
        numbers: Sequence[int],
        paths: Sequence[str],
        parameters: Sequence[Parameter],
        group: ProcessGroup | None = None,
    ) -> None:
        first = parameters[0].data
        self.index = index
        self.numbers: list[int] = list(numbers)
        self.paths: list[str] = list(paths)
        self.parameters: list[Parameter] = list(parameters)
        self.buffer: Array = allocate(sum(p.size for p in parameters), first, group)
        # So that a gradient that never comes is zero; later passes fill what is missing.
        self.buffer.fill(0)
        self.views: list[Array] = self.split(self.buffer)
        self.pending: int = len(self.numbers)
        self.residual: npt.NDArray[np.float32] | None = None
        self._before: dict[int, Array] = {}

    def keep_residual(self, known: Mapping[int, Array]) -> None:
        """Keep what reductions round away; ``known`` has the parts of it that there are already, by
        the numbers of the parameters.
        """
        self.residual = np.zeros(self.buffer.size, np.float32)
        for number, part in self.residuals().items():
            if number in known:
                part[...] = known[number]

    def residuals(self) -> dict[int, Array]:
        """Return the parts of ``residual`` by the parameters' numbers."""
        if self.residual is None:
            return {}
        return dict(zip(self.numbers, self.split(self.residual), strict=True))

    def remember(self, unused: Collection[int]) -> None:
        """Note what is kept for the parameters ``unused``, before a reduction takes it along."""
        self._before = {n: part.copy() for n, part in self.residuals().items() if n in unused}

    def take_back(self, absent: Collection[int]) -> None:
        """Keep again what was kept before the reduction for ``absent``, whose averages are dropped.

        All have been ``unused``.
        """
        for number, part in self.residuals().items():
            if number in absent:
                part[...] = self._before[number]
        self._before = {}

    def split(self, buffer: Array) -> list[Array]:
        """Return the parts of ``buffer`` (flat, this bucket's size) in the parameters' shapes."""
        return pieces(buffer, (parameter.shape for parameter in self.parameters))


def put(view: Array, grad: Array | None) -> None:
    """Copy a gradient into its place in a buffer, unless it is there; zeros where there is none."""
    if grad is None:
        view.fill(0)
    elif grad is not view:
        view[...] = grad


def allocate(size: int, like: Array, group: ProcessGroup | None) -> Array:
    """Return a flat array of ``size`` elements of the dtype and library of ``like``.

    In the symmetric memory of ``group``, if there is one and it has such memory for the library.
    """
    xp = namespace(like)
    if group is None or xp is not np or "cpu" not in group.backends or group.size() == 1:
        return xp.empty(size, dtype=like.dtype)
    return group.empty(size, like.dtype)


class GradBucket(meshlib.GradBucket):
    """What a communication hook is given: one bucket whose gradients are all there.

    Methods as in c10d, and ``paths``. The hook may change the buffer in place; what is written back
    into the parameters is the value of the future that the hook returns.
    """

    def __init__(self, bucket: Bucket, is_last: bool, group: ProcessGroup) -> None:
        self._bucket = bucket
        self._buffer = bucket.buffer
        self._is_last = is_last
        self.group: ProcessGroup | None = group
        """Over which ranks the hook averages; None: not at all."""

    def index(self) -> int:
        """Return the bucket's number; buckets are sent off in this order on every rank.

        It means the same parameters in every step but once: buckets are rebuilt after the first.
        """
        return self._bucket.index

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward pass."""
        return self._is_last

    def buffer(self) -> Array:
        """Return the flat buffer, shape (sum of the parameters' sizes,)."""
        return self._buffer

    def gradients(self) -> list[Array]:
        """Return the gradients: views of the buffer in the parameters' shapes."""
        return self._bucket.split(self._buffer)

    def reduction(self) -> ReduceOp:
        """Return the op that averages the buffer: AVG, with error feedback where the dim asks."""
        residual = self._bucket.residual
        return ReduceOp.AVG if residual is None else error_feedback(ReduceOp.AVG, residual)

    def parameters(self) -> list[Parameter]:
        """Return the parameters, in the buffer's order."""
        return list(self._bucket.parameters)

    def paths(self) -> list[str]:
        """Return the parameters' paths in the model, in the buffer's order.

        Unlike ``index`` they mean the same in every step and every run: for what a hook keeps.
        """
        return list(self._bucket.paths)

    def set_buffer(self, buffer: Array) -> None:
        """Make ``buffer`` what ``buffer()`` returns from now on.

        It has the same shape; another dtype is for hooks that turn their result back.
        """
        dtype = getattr(buffer, "dtype", None)
        check_like(buffer, self._bucket.buffer, f"bucket {self.index()}: set_buffer", dtype)
        self._buffer = buffer

    def set_group(self, group: ProcessGroup | None) -> None:
        """Say over which of the replicas the hook averages, if not over all; None: not at all.

        For uneven inputs: ``join(divide_by_initial_world_size=False)`` takes it that a hook's
        result is divided by the number of all of these, and leaves out those without inputs.
        """
        self.group = group


def check_like(got: Array, expected: Array, what: str, dtype: Any = None) -> None:
    """Raise ValueError, beginning with ``what``, unless both have the same shape and dtype.

    ``dtype`` is expected instead of that of ``expected`` if it is given.
    """
    dtype = expected.dtype if dtype is None else dtype
    if getattr(got, "shape", None) != expected.shape or got.dtype != dtype:
        described = written(got) if hasattr(got, "dtype") else type(got).__name__
        raise ValueError(f"{what}: expected {dtype.name}{list(expected.shape)}, got {described}")
