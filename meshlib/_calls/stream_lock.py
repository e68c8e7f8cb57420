"""``StreamLock``: decides which thread makes the next call of an ordered stream."""

from __future__ import annotations

import threading
from collections.abc import Sized
from typing import TYPE_CHECKING

from meshlib._native import calls as native
from transport._waiting.interrupts import is_held


class _StreamLock:
    """A lock that knows its thread; ``try_enter`` succeeds only while ``queue`` is empty.

    ``draining`` counts the threads that wait for the end of all tasks. The compiled core has the
    same class.
    """

    def __init__(self, queue: Sized, /) -> None:
        self._queued = queue
        self._lock = threading.RLock()
        self.draining: int = 0

    def try_enter(self) -> bool:
        """Take the turn if no thread has it and no task waits for it; return whether it was taken.

        The thread must then call ``leave``.
        """
        return not self._queued and not self.is_mine() and self._lock.acquire(False)

    def enter(self) -> None:
        """Wait for the turn and take it, even if tasks wait in the queue."""
        self._lock.acquire()

    def release(self) -> None:
        """Release the turn if the calling thread has it."""
        if self.is_mine():
            self._lock.release()

    def leave(self) -> None:
        """Release the turn, and ``notify`` draining threads."""
        self.release()
        if self.draining:
            self.notify()

    def notify(self) -> None:
        """Wake draining threads."""
        raise NotImplementedError

    def is_mine(self) -> bool:
        """True if the calling thread has the turn."""
        return is_held(self._lock)


if TYPE_CHECKING:
    StreamLock = _StreamLock
else:
    StreamLock = _StreamLock if native is None else native.StreamLock
