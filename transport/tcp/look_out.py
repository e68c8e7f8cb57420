"""Looking for what is about to come, for a moment, before sleeping."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_SECONDS = 500e-6
_MOST_MISSED = 15


class LookOut:
    """One receiver's way of waiting, which learns from how often looking out was in vain.

    A rank that is woken by another tends to be put on the other's core, where both then wait for
    each other: not sleeping halves the time of a small exchange. Looking holds the interpreter's
    lock, so it is for the main thread alone: another one (a group's own, or a rank that is a
    thread) would starve whoever computes.
    """

    __slots__ = ("_asleep", "_main", "_missed")

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        # How many waits go to sleep at once, and how many did when looking out was last in vain.
        self._asleep = 0
        self._missed = 0

    def until(self, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready()`` is true, or comes true soon; others may run in between."""
        if ready():
            return True
        if threading.get_ident() != self._main:
            return False
        if self._asleep:
            self._asleep -= 1
            return False
        give_up = time.perf_counter() + _SECONDS
        while time.perf_counter() < give_up:
            os.sched_yield()
            if ready():
                self._missed = 0
                return True
        # The peer is busy, or the cores are: then it is better to be woken.
        self._missed = min(2 * self._missed + 1, _MOST_MISSED)
        self._asleep = self._missed
        return False
