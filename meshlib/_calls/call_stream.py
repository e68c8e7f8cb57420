"""A stream: tasks that run one after the other, in the order of issue.

A synchronous task on an idle stream runs in the caller's own thread, which saves two thread
switches. All other tasks run on the stream's thread, which starts on first use and ends after an
idle period.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from meshlib._calls.spec import Unended
from meshlib._calls.stream_lock import StreamLock
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition

IDLE_SECONDS = 5.0


class StreamThread(threading.Thread):
    """The thread of a stream."""

    def __init__(self, stream: CallStream, target: Callable[[], None]) -> None:
        super().__init__(target=target, name=stream.name, daemon=True)
        self.stream = stream


class CallStream(StreamLock):
    """One ordered sequence of tasks. A task must not raise: it reports through its Work.

    ``try_enter`` and ``submit`` define the order of issue; the caller serializes them.

    The thread that runs a task holds the turn. It takes the turn before it removes the task from
    the queue. So the stream is idle if the queue is empty and the turn, checked after it, is free.
    """

    draining: int

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: deque[Callable[[], None]] = deque()
        super().__init__(self._queue)
        # Wakes the stream's thread for a task, and draining threads when the stream is idle.
        self._changed = Condition()
        self._thread: threading.Thread | None = None
        self.unended: Unended | None = None
        """The previous call, if it still waits for its last frames; the next call ends it."""

    def submit(self, task: Callable[[], None]) -> None:
        """Append ``task``; it runs on the stream's thread after all earlier tasks."""
        with self._changed:
            self._queue.append(task)
            if self._thread is None:
                self._thread = StreamThread(self, self._run)
                self._thread.start()
            else:
                self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until the stream is idle; return whether it is."""
        with self._changed:
            self.draining += 1
            try:
                return self._changed.wait_for(self.is_idle, timeout)
            finally:
                self.draining -= 1

    def join(self, timeout: float) -> None:
        """Let the thread end when it is idle; wait up to ``timeout`` seconds for its end."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def is_idle(self) -> bool:
        """True if nothing is queued or running."""
        with self._changed:  # concurrent checks would make each other fail
            mine = self.is_mine()
            try:
                return self.try_enter()
            finally:
                if not mine:
                    self.release()

    def notify(self) -> None:
        """See ``StreamLock.leave``."""
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._thread is not me, IDLE_SECONDS)
                if not self._queue:
                    if self._thread is me:
                        self._thread = None
                    return
            self.enter()
            # A joined thread and its successor may both have seen the same task.
            task = self._queue.popleft() if self._queue else None
            if task is not None:
                task()
            del task  # its arrays must not live until the next task
            unended = self.unended
            if unended is not None and not self._queue:
                self.unended = None
                unended.end()
            del unended
            self.leave()


class ContinuationStream(CallStream):
    """The continuations of a group's calls: the callbacks of their futures.

    They run in the order in which the calls ended. The stream is separate from the calls' streams,
    so callbacks may wait for later calls of their group. A callback that waits for a later one runs
    the callbacks in between. The stream's thread first calls ``enter()``.
    """

    def __init__(self, name: str, enter: Callable[[], None] | None = None) -> None:
        super().__init__(name)
        self._enter = enter
        self.awaited: object = None
        """The object that the running task waits for."""

    def _run(self) -> None:
        if self._enter is not None:
            self._enter()
        super()._run()

    def is_current(self) -> bool:
        """True if the calling thread runs a task of this stream."""
        return getattr(threading.current_thread(), "stream", None) is self

    def run_until(self, done: Callable[[], bool], deadline: Deadline | None) -> None:
        """Run tasks, from within a task, until ``done()`` or the deadline.

        A later task must make ``done()`` true.
        """
        while not done() and not (deadline is not None and deadline.expired):
            with self._changed:
                left = None if deadline is None else deadline.remaining()
                self._changed.wait_for(lambda: bool(self._queue), left)
                task = self._queue.popleft() if self._queue else None
            if task is not None:
                task()
