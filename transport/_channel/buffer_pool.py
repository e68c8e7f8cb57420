"""Receive buffers that are reused once nothing refers to them."""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

KEPT_BYTES = 160 << 20
"""The most bytes that the pool holds."""
_WORTH_KEEPING = 256 << 10
_UNUSED = 2
"""The references to an unused array: from the list, and from ``getrefcount`` itself."""


class BufferPool:
    """Reuses receive buffers. Thread-safe.

    The kernel clears each page of new memory at its first use, which takes longer than the copy
    that fills it. Programs send arrays of the same sizes again and again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of ``nbytes`` with undefined contents. The pool reuses it once nothing
        else refers to it.
        """
        if nbytes < _WORTH_KEEPING:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            kept = self._kept
            for i in range(len(kept)):
                # Views, memoryviews and the arrays made of them hold references, too.
                if kept[i].nbytes == nbytes and sys.getrefcount(kept[i]) <= _UNUSED:
                    kept.append(kept.pop(i))
                    return kept[-1]
            array = np.empty(nbytes, np.uint8)
            kept.append(array)
            while sum(one.nbytes for one in kept) > KEPT_BYTES:
                del kept[0]
            return array
