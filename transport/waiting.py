"""How a thread waits for what others bring.

Where it will be woken, it looks for a moment before it sleeps: ``LookOut``. Where nothing would
wake it, it asks ever more rarely: ``Pauses``.

``transport/native/shm/waiting.c`` is ``LookOut`` in C.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

# So long the processor is offered to others before a thread goes to sleep.
_YIELD_SECONDS = 500e-6
# What came after so few yields was done by somebody who had been waiting for this very core.
_FEW_YIELDS = 2
_FEWEST_SPINS = 4


class LookOut:
    """One receiver's way of looking for what is about to come, before it sleeps.

    A rank that is woken by another tends to be put on the other's core, where both then wait for
    each other: not sleeping halves the time of a small exchange. Looking holds the interpreter's
    lock, and polling a core as well, so it is brief.

    ``spins`` is how often to look before the core is first offered to others; it becomes a few
    where offering turns out to be what helps, as it does where other programs leave the ranks one
    core together. ``most_missed`` is how many waits may go to sleep at once after looking has been
    in vain several times: then whoever is waited for is busy or far. 0: each wait looks.
    ``main_only``: no other thread than the main one looks, since another one (a group's own, or a
    rank that is a thread) would starve whoever computes.
    """

    __slots__ = ("_asleep", "_main", "_missed", "_most_missed", "_most_spins", "_spins")

    def __init__(self, spins: int = 0, most_missed: int = 0, *, main_only: bool = False) -> None:
        self._main = threading.main_thread().ident if main_only else None
        self._most_spins = spins
        self._spins = spins
        self._most_missed = most_missed
        # How many waits go to sleep at once, and how many did when looking was last in vain.
        self._asleep = 0
        self._missed = 0

    def until(self, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready()`` is true, or comes true soon; others may run in between."""
        if ready():
            return True
        if self._main is not None and threading.get_ident() != self._main:
            return False
        if self._asleep:
            self._asleep -= 1
            return False
        for _ in range(self._spins):
            if ready():
                return True
        give_up = time.perf_counter() + _YIELD_SECONDS
        yields = 0
        while True:
            os.sched_yield()
            yields += 1
            if ready():
                spins = _FEWEST_SPINS if yields <= _FEW_YIELDS else self._most_spins
                self._spins = min(spins, self._most_spins)
                self._missed = 0
                return True
            if time.perf_counter() >= give_up:
                self._missed = self._asleep = min(2 * self._missed + 1, self._most_missed)
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
