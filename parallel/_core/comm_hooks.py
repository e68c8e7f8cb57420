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

from meshlib import Future
from parallel._core.grad_bucket import GradBucket
from parallel._groups import Ranks, resolve

CommHook = Callable[[Any, GradBucket], Future[Any]]
"""``hook(state, bucket)``: begins the reduction of a bucket; its future's value is the average."""


def allreduce_hook(process_group: Ranks | None, bucket: GradBucket) -> Future[Any]:
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


def check_state(state: object, expected: type, hook: str) -> None:
    """Raise TypeError unless ``state`` is what ``hook`` was to be registered with."""
    if not isinstance(state, expected):
        raise TypeError(
            f"{hook} has to be registered with a {expected.__name__} as its state, got {state!r}"
        )


def only(value: Any) -> Any:
    """Return what a hook's future holds: an array, or as in c10d a list of one."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
