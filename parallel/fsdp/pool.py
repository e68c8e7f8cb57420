"""Flat arrays for whole parameters and gradients, which groups use one after the other.

Making such an array anew for each use would cost more than filling it: the system hands out zeroed
pages one by one, and symmetric memory is agreed on with a message. All ranks take and give in the
same order, so they all make, or use again, the same array.
"""

from __future__ import annotations

from typing import Any

from meshlib import ProcessGroup
from parallel.arrays import Array, namespace, placement
from parallel.ddp.buckets import allocate


class Pool:
    """Arrays that are not in use, by group, dtype and device."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, tuple[str, str]], list[Array]] = {}

    def take(self, group: ProcessGroup, count: int, like: Array, dtype: Any) -> Array:
        """Return a flat array of at least ``count`` elements, symmetric on ``group`` if it can be.

        Free ones that are too small are let go, so that there are never more than are in use at a
        time, each as large as the largest.
        """
        model = namespace(like).empty(0, dtype=dtype)
        free = self._free.setdefault((group.id, placement(model)), [])
        fitting = [array for array in free if array.size >= count]
        if not fitting:
            free.clear()
            return allocate(count, model, group)
        best = min(fitting, key=lambda array: array.size)
        free[:] = [array for array in free if array is not best]
        return best

    def give(self, group: ProcessGroup, array: Array) -> None:
        """Take back an array; nobody may use it or a view of it any more."""
        self._free.setdefault((group.id, placement(array)), []).append(array)
