"""How a thread waits for what others bring.

Where it will be woken, it looks for a moment before it sleeps: ``LookOut``. Where nothing would
wake it, it asks ever more rarely: ``Pauses``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

LOOK_SECONDS = 500e-6
"""So long the processor is offered to others before a thread goes to sleep."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.064


class LookOut:
    """One receiver's way of looking for what is about to come, before it sleeps. One thread at a
    time.

    To sleep and be woken takes longer than most small calls: some 40 microseconds on either side,
    in a virtual machine more. And a rank that is woken by another tends to be put on the other's
    core, where both then wait for each other: not sleeping halves the time of a small exchange.
    Looking holds the interpreter's lock and a core, which is offered to others after each look, so
    it is brief. (``transport/_native/engine/waiting.c`` looks at shared memory without the lock.)

    ``seconds`` is how long to look. ``pauses``: where that was in vain, whoever is
    waited for is busy or far; for a while waits sleep at once, and for longer each time, so that a
    hundredth of the time is spent in vain at most. ``main_only``: no other thread than the main one
    looks, since another one (a group's own, or a rank that is a thread) would starve whoever
    computes.
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
        # How long looking is left out since it was in vain, and until when.
        self._pause = self._again = 0.0

    @property
    def looks(self) -> bool:
        """Whether the calling thread would look this time, instead of sleeping at once."""
        if self._main is not None and threading.get_ident() != self._main:
            return False
        return not self._pause or time.perf_counter() >= self._again

    def until(self, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready()`` is true, or comes true soon; others may run in between."""
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
    """Pauses for what must be asked again and again, since nothing wakes who waits for it.

    The first has ``first`` seconds, each other one ``factor`` times those of the one before, up to
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
        """Begin with the first again: something has come."""
        self._next = self._first
