"""Waiting for other threads, processes and devices.

A thread that an event will wake polls for a moment before it sleeps: ``SpinWait``. One that no
event can wake polls at growing intervals: ``Pauses``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 500e-6
"""The time that a thread polls, and yields its core in between, before it sleeps."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.064


class SpinWait:
    """Polls for an event before its receiver sleeps. One thread at a time.

    Sleeping and waking takes longer than most small calls: some 40 microseconds on either side, in
    a virtual machine more. The kernel also tends to wake a rank on its waker's core, where the two
    then delay each other. Polling holds the interpreter's lock and a core. It yields the core
    between two polls, and is brief. (``transport/_native/engine/waiting.c`` polls shared memory
    without the lock.)

    ``seconds`` is how long to poll. With ``pauses``, an unsuccessful poll (the peer is busy or far)
    is followed by a time in which waits sleep at once. This time doubles from 1 ms to 64 ms, where
    less than a hundredth of the time is polled in vain. With ``main_only``, only the main thread
    polls. Another thread (a group's own, or a rank that is a thread) would starve the computing
    one.
    """

    __slots__ = ("_again", "_main", "_pause", "_pauses", "_seconds")

    def __init__(
        self,
        *,
        pauses: bool = False,
        seconds: float = LOOK_SECONDS,
        main_only: bool = False,
    ) -> None:
        self._main = threading.main_thread().ident if main_only else None
        self._pauses = pauses
        self._seconds = seconds
        # After unsuccessful polls, polling is skipped: for this many seconds, until this time.
        self._pause = self._again = 0.0

    @property
    def looks(self) -> bool:
        """True if the calling thread would poll this time, instead of sleeping at once."""
        if self._main is not None and threading.get_ident() != self._main:
            return False
        return not self._pause or time.perf_counter() >= self._again

    def until(self, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready()`` is true now or soon; other threads may run in between."""
        if ready():
            return True
        if not self.looks:
            return False
        give_up = time.perf_counter() + self._seconds
        while True:
            os.sched_yield()
            if ready():
                self._pause = 0.0
                return True
            now = time.perf_counter()
            if now >= give_up:
                if self._pauses:
                    self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
                    self._again = now + self._pause
                return False


class Pauses:
    """The pauses of a thread that must poll, because no event wakes it.

    The first pause is ``first`` seconds. Each further one is ``factor`` times longer, up to
    ``longest``.
    """

    __slots__ = ("_factor", "_first", "_longest", "_next")

    def __init__(self, first: float, longest: float, factor: float = 2.0) -> None:
        self._first = self._next = first
        self._longest = longest
        self._factor = factor

    def next(self, left: float = math.inf) -> float:
        """Return the next pause in seconds, at most ``left``."""
        pause = min(self._next, left)
        self._next = min(self._next * self._factor, self._longest)
        return pause

    def restart(self) -> None:
        """Begin with the first pause again, after an event."""
        self._next = self._first
