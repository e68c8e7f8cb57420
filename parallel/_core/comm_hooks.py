"""Communication hooks: how one bucket of gradients becomes the group's.

A hook is called as ``hook(state, bucket)`` as soon as the bucket is complete, while the backward
pass goes on, on every rank for the same buckets in the same order. It returns a future whose value
is the flat array to write back. It must not wait for communication itself.

These are the ones that the wrapper itself needs; ``parallel.comm_hooks`` has all.
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
    """The argument of a communication hook: one bucket whose gradients are complete.

    Methods as in c10d, and ``paths``. The hook may change the buffer in place. The value of the
    future that it returns is written back into the gradients.
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
        """True if this is the last bucket of the backward pass."""
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

    def parameters(self) -> list[Any]:
        """Return the parameters, in the buffer's order: for JAX their shapes and dtypes."""
        return [spec.parameter for spec in self._bucket.specs]

    def paths(self) -> list[str]:
        """Return the parameters' paths in the model, in the buffer's order.

        Unlike ``index`` they mean the same in every step and every run: for what a hook keeps.
        """
        return [spec.name for spec in self._bucket.specs]

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


CommHook = Callable[[Any, GradBucket], Future[Any]]
"""``hook(state, bucket)``: begins the reduction of a bucket; its future's value is the average."""


def allreduce_hook(process_group: GroupLike | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket over the group, in place. What runs without any other hook.

    ``process_group``: ``mesh["dp"]``, a group, or None for the wrapper's own.
    """
    ranks = bucket.group if process_group is None else process_group
    group = resolve(ranks, "the hook's process_group")
    work = group.all_reduce(bucket.buffer(), op=bucket.reduction(), async_op=True)
    return work.get_future()


def noop_hook(state: object, bucket: GradBucket) -> Future[Any]:
    """Leave each rank its own gradients: for measuring a step without communication.

    ``state`` is not used. Returns a future that is done, with the ``bucket``'s buffer as it is.
    """
    bucket.set_group(None)
    future = Future()
    future.set_result(bucket.buffer())
    return future


def compress_wrapper(hook: CommHook, dtype: npt.DTypeLike) -> CommHook:
    """Return ``hook`` run on the bucket rounded to ``dtype``; the result is widened again.

    A bucket whose elements are no wider than those of ``dtype`` is left as it is.
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
    """Return the array in a hook's future, which is an array or, as in c10d, a list of one."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
