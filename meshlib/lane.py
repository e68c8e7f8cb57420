"""A lane: tasks that run one after the other, in the order in which they were issued.

A synchronous task on an idle lane runs in the caller's own thread, which saves two thread
switches; all others run on the lane's thread, which is started when it is first needed and ends
after a quiet while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

IDLE_SECONDS = 5.0


class Lane:
    """One ordered sequence of tasks. A task must not raise: it reports through its Work."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False
        self._draining = 0
        self._thread: threading.Thread | None = None

    def try_enter(self) -> bool:
        """Take an idle lane for the calling thread; it must then ``leave``. False if busy."""
        with self._lock:
            if self._busy or self._queue:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        """End what ``try_enter`` began."""
        with self._lock:
            self._busy = False
            if self._queue:
                self._wake()
            elif self._draining:
                self._changed.notify_all()

    def submit(self, task: Callable[[], None]) -> None:
        """Append ``task``; it runs on the lane's thread when all before it have ended."""
        with self._lock:
            self._queue.append(task)
            if not self._busy:
                self._wake()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is queued or running; return whether that came in time (seconds)."""
        with self._lock:
            self._draining += 1
            try:
                return self._changed.wait_for(lambda: not self._busy and not self._queue, timeout)
            finally:
                self._draining -= 1

    def join(self, timeout: float) -> None:
        """Let the thread end as soon as it is idle, and wait for that (seconds)."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        else:
            self._changed.notify_all()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                ready = self._changed.wait_for(
                    lambda: (self._queue and not self._busy) or self._thread is not me,
                    IDLE_SECONDS,
                )
                if not self._queue or self._busy:
                    if self._thread is me and not ready:
                        self._thread = None
                    if self._thread is not me:
                        return
                    continue
                task = self._queue.popleft()
                self._busy = True
            task()
            del task  # its arrays must not live until the next task comes
            with self._lock:
                self._busy = False
                if self._draining and not self._queue:
                    self._changed.notify_all()
