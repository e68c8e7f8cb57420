"""Looking again for a moment before sleeping.

To sleep and be woken takes longer than most calls: some 40 microseconds on either side, in a
virtual machine more. What comes sooner is there without it. Between two looks the core is offered
to others: the peer may wait for this very one, and the kernel likes to put those together who wake
each other. Where looking is in vain all the same (the function takes its time, programs that
compute have all cores), it is not done again for a while, and then for longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LOOK_SECONDS = 200e-6
"""For how long to look."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.064
"""Of the time, a three-hundredth is spent in vain at most."""


class Patience:
    """Whether and how to look for what comes from one peer. One thread at a time."""

    __slots__ = ("_again", "_pause")

    def __init__(self) -> None:
        self._pause = self._again = 0.0

    @property
    def looks(self) -> bool:
        """Whether to look this time, instead of sleeping at once."""
        return not self._pause or time.perf_counter() >= self._again

    def look(self, receive: Callable[[], T]) -> T | None:
        """Return what ``receive()`` does as soon as it no longer raises BlockingIOError, None if
        that takes too long.
        """
        until = time.perf_counter() + LOOK_SECONDS
        while True:
            try:
                found = receive()
            except (BlockingIOError, InterruptedError):
                now = time.perf_counter()
                if now < until:
                    os.sched_yield()
                    continue
                self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
                self._again = now + self._pause
                return None
            self._pause = 0.0
            return found
