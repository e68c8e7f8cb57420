"""``StreamLock``: which thread may make the next call of an ordered stream of calls."""

from __future__ import annotations

import threading
from collections.abc import Sized
from typing import TYPE_CHECKING

from meshlib._native import calls as native
from transport._waiting.interrupts import is_held


class _StreamLock:
    """A lock that knows its thread, and is free only while nothing waits in ``queue``.

    Those who wait for the end of all count themselves in ``draining``. The compiled core has the
    same.
    """

    def __init__(self, queue: Sized, /) -> None:
        self._queued = queue
        self._lock = threading.RLock()
        self.draining: int = 0

    def try_enter(self) -> bool:
        """Take the turn if nobody has it or waits for it; return whether that was so.

        The thread that takes it must ``leave``.
        """
        return not self._queued and not self.is_mine() and self._lock.acquire(False)

    def enter(self) -> None:
        """Wait for the turn and take it, whatever the queue has."""
        self._lock.acquire()

    def release(self) -> None:
        """Give the turn back if the calling thread has it."""
        if self.is_mine():
            self._lock.release()

    def leave(self) -> None:
        """Give the turn back, and ``notify`` those who wait for the end of all."""
        self.release()
        if self.draining:
            self.notify()

    def notify(self) -> None:
        """Wake those who wait for the end of all."""
        raise NotImplementedError

    def is_mine(self) -> bool:
        """True if the calling thread has the turn."""
        return is_held(self._lock)


if TYPE_CHECKING:
    StreamLock = _StreamLock
else:
    StreamLock = _StreamLock if native is None else native.StreamLock
