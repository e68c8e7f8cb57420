"""Memory for what is fetched, used again once nobody refers to it."""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

KEPT_BYTES = 160 << 20
"""How much memory is kept for later, at most."""
_WORTH_KEEPING = 256 << 10
_UNUSED = 2
"""References to a kept array that nobody uses: the list's, and that of who counts them."""


class Recycler:
    """Gives memory out. Any thread.

    The kernel clears each page of fresh memory when it is first touched, which takes longer than
    the copy that fills it. Programs send arrays of the same sizes again and again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an array of ``nbytes``, of any content. It is the caller's as long as anything
        refers to it.
        """
        if nbytes < _WORTH_KEEPING:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            kept = self._kept
            for i in range(len(kept)):
                # Views of it, memoryviews and their arrays too, hold references.
                if kept[i].nbytes == nbytes and sys.getrefcount(kept[i]) <= _UNUSED:
                    kept.append(kept.pop(i))
                    return kept[-1]
            array = np.empty(nbytes, np.uint8)
            kept.append(array)
            while sum(one.nbytes for one in kept) > KEPT_BYTES:
                del kept[0]
            return array
