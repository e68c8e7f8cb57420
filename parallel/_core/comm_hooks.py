"""Communication hooks, which reduce one bucket of gradients over a group.

``hook(state, bucket)`` is called as soon as the bucket is complete, while the backward pass
continues, for the same buckets in the same order on every rank. It returns a future whose value is
the flat array to write back. It must not wait for communication itself.

This module has the hooks that the wrapper itself needs; ``parallel.comm_hooks`` has all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import meshlib
from meshlib import Future, ProcessGroup, ReduceOp, error_feedback
from parallel._arrays import Array, written
from parallel._core.buckets import Bucket
from parallel._groups import GroupLike, resolve


class GradBucket(meshlib.GradBucket):
    """The argument of a communication hook: a bucket of complete gradients.

    It has the methods of c10d's GradBucket, and ``paths``. The hook may change the buffer in place.
    The value of the future that it returns is written back into the gradients.
    """

    def __init__(self, bucket: Bucket, is_last: bool, group: ProcessGroup) -> None:
        self._bucket = bucket
        self._buffer = bucket.buffer
        self._is_last = is_last
        self.group: ProcessGroup | None = group
        """The ranks over which the hook averages; None: it does not average."""

    def index(self) -> int:
        """Return the bucket's number; on every rank, buckets are reduced in order of this number.

        It identifies the same parameters in every step, except that buckets are rebuilt once,
        after the first step.
        """
        return self._bucket.index

    def is_last(self) -> bool:
        """True if this is the last bucket of the backward pass."""
        return self._is_last

    def buffer(self) -> Array:
        """Return the flat buffer, of shape (sum of the parameters' sizes,)."""
        return self._buffer

    def gradients(self) -> list[Array]:
        """Return the gradients as views of the buffer in the parameters' shapes."""
        return self._bucket.split(self._buffer)

    def reduction(self) -> ReduceOp:
        """Return the averaging op: AVG, with error feedback if the group's compression has it."""
        residual = self._bucket.residual
        return ReduceOp.AVG if residual is None else error_feedback(ReduceOp.AVG, residual)

    def parameters(self) -> list[Any]:
        """Return the parameters in the buffer's order; for JAX, their shapes and dtypes."""
        return [spec.parameter for spec in self._bucket.specs]

    def paths(self) -> list[str]:
        """Return the parameters' paths in the model, in the buffer's order.

        Unlike ``index``, they are the same in every step and run: use them as keys of a hook's
        state.
        """
        return [spec.name for spec in self._bucket.specs]

    def set_buffer(self, buffer: Array) -> None:
        """Replace the array that ``buffer()`` returns.

        The shape must be the same. A hook that sets another dtype must convert its result back.
        """
        dtype = getattr(buffer, "dtype", None)
        check_like(buffer, self._bucket.buffer, f"bucket {self.index()}: set_buffer", dtype)
        self._buffer = buffer

    def set_group(self, group: ProcessGroup | None) -> None:
        """Declare the replicas over which the hook averages, if not all; None: it does not average.

        ``join(divide_by_initial_world_size=False)`` needs this for uneven inputs: it assumes that
        the hook divides by the size of this group, and corrects for ranks without inputs.
        """
        self.group = group


def check_like(got: Array, expected: Array, what: str, dtype: Any = None) -> None:
    """Raise ValueError, beginning with ``what``, unless both have the same shape and dtype.

    ``dtype``, if given, replaces the dtype of ``expected``.
    """
    dtype = expected.dtype if dtype is None else dtype
    if getattr(got, "shape", None) != expected.shape or got.dtype != dtype:
        described = written(got) if hasattr(got, "dtype") else type(got).__name__
        raise ValueError(f"{what}: expected {dtype.name}{list(expected.shape)}, got {described}")


CommHook = Callable[[Any, GradBucket], Future[Any]]
"""``hook(state, bucket)``: starts the reduction of a bucket; its future's value is the average."""


def allreduce_hook(process_group: GroupLike | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket over the group, in place. This is the default hook.

    ``process_group`` is ``mesh["dp"]``, a group, or None for the wrapper's own.
    """
    ranks = bucket.group if process_group is None else process_group
    group = resolve(ranks, "the hook's process_group")
    work = group.all_reduce(bucket.buffer(), op=bucket.reduction(), async_op=True)
    return work.get_future()


def noop_hook(state: object, bucket: GradBucket) -> Future[Any]:
    """Do not communicate: each rank keeps its gradients, to measure a step without communication.

    ``state`` is not used. Returns a completed future with the unchanged buffer of ``bucket``.
    """
    bucket.set_group(None)
    future = Future()
    future.set_result(bucket.buffer())
    return future


def compress_wrapper(hook: CommHook, dtype: npt.DTypeLike) -> CommHook:
    """Return a hook that runs ``hook`` on the bucket in ``dtype`` and converts the result back.

    A bucket whose elements are not wider than ``dtype`` is not converted.
    """
    narrow = np.dtype(dtype)

    def compressed(state: Any, bucket: GradBucket) -> Future[Any]:
        wide = bucket.buffer()
        if wide.dtype.itemsize <= narrow.itemsize:
            return hook(state, bucket)
        bucket.set_buffer(wide.astype(narrow))

        def widen(future: Future[Any]) -> Any:
            wide[...] = only(future.value())
            return wide

        return hook(state, bucket).then(widen)

    return compressed


def only(value: Any) -> Any:
    """Return the array of a hook's result, which is an array or, as in c10d, a list of one."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
