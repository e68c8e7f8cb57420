"""Polling for other threads, processes and devices.

A thread that an event can wake polls briefly before it sleeps (``SpinWait``). A thread that no
event can wake polls at growing intervals (``PollBackoff``).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 500e-6
"""The time that a thread polls before it sleeps; it yields its core between polls."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.064


class SpinWait:
    """Polls for an event before the waiting thread sleeps. One thread at a time may use it.

    Sleeping and waking take longer than most small calls. The kernel also tends to wake a rank on
    its waker's core, where the two then delay each other. Polling holds the GIL and a core, so it
    is brief and yields the core between polls. (``transport/_native/engine/waiting.c`` polls shared
    memory without the GIL.)

    Polling ends after ``seconds``. With ``pauses``, after an unsuccessful poll (the peer is busy or
    distant) waits sleep immediately for a time, which doubles from 1 ms to 64 ms. Vain polling then
    costs less than 1 % of the time. With ``main_only``, only the main thread polls, because another
    thread (a group's own, or a rank that is a thread) would starve the computing thread.
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
        # After an unsuccessful poll, polling is skipped for ``_pause`` seconds, until ``_again``.
        self._pause = self._again = 0.0

    @property
    def looks(self) -> bool:
        """True if the calling thread should poll now, False if it should sleep immediately."""
        if self._main is not None and threading.get_ident() != self._main:
            return False
        return not self._pause or time.perf_counter() >= self._again

    def until(self, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready()`` becomes true while polling; other threads may run."""
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


class PollBackoff:
    """The pauses of a thread that must poll because no event wakes it.

    The first pause is ``first`` seconds. Each next pause is ``factor`` times longer, up to
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
        """Restart with the first pause, after an event."""
        self._next = self._first
