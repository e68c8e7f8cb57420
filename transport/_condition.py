"""A condition variable that Ctrl-C leaves whole: ``threading.Condition`` does not survive it.

Python raises KeyboardInterrupt in the main thread between any two calls: also behind the one that
took a lock in ``Condition.__enter__``, which then stays taken, or the one that gave it back in
``Condition.wait``, whose caller then releases what another thread holds. So the lock is one that
knows its thread (``RLock``), is taken by ``with condition.lock``, in which no Python code runs, and
is held however ``wait`` ends. What an interrupt leaves taken all the same, ``let_go`` gives back.

In Python 3.12 and 3.13 the jump back of ``while condition:`` is outside of the ``with`` or ``try``
around the loop, and Python looks for signals there. So a loop under what has to be given back
begins with ``while True:``, or is in a function of its own, such as ``wait_for``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Condition:
    """What threads wait for under ``lock``, which several conditions may share.

    The methods are for those who hold the lock, once.
    """

    __slots__ = ("_waiters", "lock")

    def __init__(
        self,
        lock: threading.RLock | None = None,  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        self.lock = threading.RLock() if lock is None else lock
        self._waiters: list[threading.Lock] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``notify_all``, without the lock; False if ``timeout`` seconds pass first."""
        lock, waiter, notified = self.lock, threading.Lock(), False
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            try:
                lock.release()
                notified = waiter.acquire(timeout=-1 if timeout is None else timeout)
            finally:
                hold(lock)
        except BaseException:
            hold(lock)
            raise
        # An interrupted wait leaves its own behind, which goes with the next news.
        if not notified:
            with suppress(ValueError):
                self._waiters.remove(waiter)
        return notified

    def wait_for(self, holds: Callable[[], object], timeout: float | None) -> bool:
        """Wait until ``holds()``; return whether that came within ``timeout`` seconds."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not holds():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.wait(min(left, threading.TIMEOUT_MAX))
        return True

    def notify_all(self) -> None:
        """Wake all who wait."""
        for waiter in self._waiters:
            if waiter.locked():  # not one that an interrupted notify_all has woken
                waiter.release()
        self._waiters.clear()


def let_go(lock: threading.RLock) -> None:  # pyright: ignore[reportInvalidTypeForm]
    """Give the lock back, however often the calling thread has taken it, if at all."""
    with suppress(RuntimeError):
        while True:
            lock.release()


def hold(lock: threading.RLock) -> None:  # pyright: ignore[reportInvalidTypeForm]
    """Take the lock unless the calling thread has it."""
    if not has(lock):
        lock.acquire()


def has(lock: threading.RLock) -> bool:  # pyright: ignore[reportInvalidTypeForm]
    """Whether the calling thread has the lock."""
    return lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]
