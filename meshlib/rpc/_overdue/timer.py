"""A thread for timed work, and for work that other threads must not do."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable

from transport._waiting.deadline import LONGEST_WAIT
from transport._waiting.polling import Wakeup


class TimerThread:
    """A thread that calls the function ``work`` of ``start`` at scheduled times.

    ``work`` returns the time (monotonic seconds) of its next call. A caller of ``call_at`` records
    its task first, so that ``work`` finds it.
    """

    def __init__(self, name: str) -> None:
        self._work: Callable[[], float] = lambda: math.inf
        self._due = math.inf
        self._lock = threading.Lock()
        self._notified = self._closed = False
        self._wakeup: Wakeup | None = Wakeup()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, work: Callable[[], float]) -> None:
        """Start the thread, which calls ``work``."""
        self._work = work
        self._thread.start()

    def call_at(self, moment: float) -> None:
        """Schedule a call of ``work`` at ``moment`` or earlier."""
        if moment < self._due:
            with self._lock:
                self._due = min(self._due, moment)
            self._wake()

    def notify(self) -> None:
        """Schedule a call of ``work`` now. Takes no lock, so ``__del__`` may call this."""
        self._notified = True
        self._wake()

    def _wake(self) -> None:
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.notify()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self.notify()
        if self._thread is not threading.current_thread():
            if self._thread.is_alive():
                self._thread.join(5.0)
            self._wakeup = None

    def _run(self) -> None:
        wakeup = self._wakeup
        assert wakeup is not None
        poll = select.poll()
        poll.register(wakeup.fd, select.POLLIN)
        while not self._closed:
            left = self._due - time.monotonic()
            poll.poll(min(max(left, 0.0), LONGEST_WAIT) * 1000)
            wakeup.clear()
            notified, self._notified = self._notified, False
            if self._closed:
                return
            if not notified and time.monotonic() < self._due:
                continue
            self._due = math.inf
            moment = self._work()
            with self._lock:
                self._due = min(self._due, moment)
