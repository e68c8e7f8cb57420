"""A pool of threads that share one poller: the thread that reads a request also runs it.

One idle thread always polls. A thread that reads several requests leaves all but one in the
backlog. Computing Python threads alternate, so a second thread helps with the backlog only while no
job ends, because a handler waits or computes for a long time.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Protocol

from transport._net.fork import in_forked_children
from transport._waiting.polling import READABLE, Wakeup, new_poller, once

_LOGGER = logging.getLogger("meshlib.transport")
Job = Callable[[], None]
LOOK_SECONDS = 0.002
"""A second thread helps if no job has ended for this time."""
IDLE_SECONDS = 5.0
END_SECONDS = 5.0


class Polled(Protocol):
    """A connection, as the pool uses it."""

    fd: int

    def ready(self, events: int) -> None:
        """Receive and send without blocking."""
        ...

    def look(self) -> bool:
        """Wait a moment for the next request; return whether one arrived."""
        ...


class _ThreadState(threading.local):
    """The calling thread's state: whether it runs a job, the number of nested ``slot_released``,
    and the connection of its last job.
    """

    running = False
    paused = 0
    latest: Polled | None = None


class ThreadPool:
    """Runs at most ``limit`` jobs at once, not counting jobs that wait in ``slot_released``.

    ``name`` is a prefix of the threads' names. Each thread calls ``enter()`` first, and
    ``on_error(error)``, which must not raise, after a job's exception. Threads start when they are
    needed, and end when they have been idle for a while.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        enter: Callable[[], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.name = name
        self.limit = limit
        self.enter = enter
        self._on_error = on_error
        self._lock = threading.Lock()
        self._backlog: deque[tuple[Job, int]] = deque()
        self.backlog_bytes: int = 0
        self.running: int = 0
        """The number of running jobs, without those in ``slot_released``."""
        self.done: int = 0
        """The number of completed jobs."""
        self._idle = 0
        self._helper: int | None = None
        self._when_short: tuple[int, int, Job] | None = None
        self._here = _ThreadState()
        self._polled: dict[int, Polled] = {}
        self._threads: set[threading.Thread] = set()
        self._number = 0
        self._closed = False
        self._poller = new_poller()
        self._wakeup: Wakeup | None = Wakeup()
        self._poller.register(self._wakeup.fd, READABLE)
        in_forked_children(self, ThreadPool._leave_behind)
        self._spawn()

    # ------------------------------------------------------------------ polling

    def register(self, polled: Polled, events: int) -> None:
        """Poll ``polled`` for ``events``, once."""
        self._polled[polled.fd] = polled
        self._poller.register(polled.fd, once(events))

    def arm(self, polled: Polled, events: int) -> None:
        """Poll ``polled`` for ``events``, once, if it is registered."""
        if polled.fd in self._polled:
            self._poller.modify(polled.fd, once(events))

    def forget(self, polled: Polled) -> None:
        """Stop polling ``polled``."""
        if self._polled.pop(polled.fd, None) is not None:
            with suppress(OSError, ValueError):
                self._poller.unregister(polled.fd)

    # ------------------------------------------------------------------ jobs

    @property
    def backlog(self) -> int:
        """The number of jobs that have not begun."""
        return len(self._backlog)

    @property
    def busy(self) -> int:
        """The number of jobs that have not ended, including those that wait."""
        with self._lock:
            return len(self._backlog) + len(self._threads) - self._idle

    def add(self, job: Job, nbytes: int = 0) -> None:
        """Append ``job`` to the backlog, from which the calling thread of the pool will run it."""
        with self._lock:
            self._backlog.append((job, nbytes))
            self.backlog_bytes += nbytes

    def submit(self, job: Job) -> None:
        """Append ``job`` to the backlog, and wake a thread for it."""
        self.add(job)
        self.notify()

    def notify(self) -> None:
        """Wake an idle thread. Acquires no lock."""
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.notify()

    def when_short(self, jobs: int, nbytes: int, then: Job) -> bool:
        """Call ``then()`` once the backlog has at most ``jobs`` with ``nbytes``.

        Return False, without calling ``then``, if it is that short already.
        """
        with self._lock:
            self._when_short = jobs, nbytes, then
            return self._is_short() is None

    @property
    def in_a_job(self) -> bool:
        """True if the calling thread runs a job of this pool."""
        return self._here.running

    @contextmanager
    def slot_released(self) -> Generator[None]:
        """Let another job run while the calling thread's job waits."""
        here = self._here
        if not here.running or here.paused:
            here.paused += 1
            try:
                yield
            finally:
                here.paused -= 1
            return
        with self._lock:
            self.running -= 1
            alone = self._idle == 0
            more = bool(self._backlog)
        if alone:
            self._spawn()
        if more:
            self.notify()
        here.paused = 1
        try:
            yield
        finally:
            here.paused = 0
            with self._lock:
                self.running += 1

    # ------------------------------------------------------------------ the threads

    def close(self) -> None:
        """End the threads after their current jobs; join them, for a few seconds."""
        self._closed = True
        self.notify()
        me = threading.current_thread()
        with self._lock:
            threads = [thread for thread in self._threads if thread is not me]
        for thread in threads:
            thread.join(END_SECONDS)
        with self._lock:
            left = self._threads - {me}
        if not left and me not in self._threads:
            self._poller.close()
            self._wakeup = None

    def _leave_behind(self) -> None:
        """Close the poller in a forked child, which has none of the threads."""
        self._closed = True
        self._poller.close()
        self._wakeup = None

    def _spawn(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._idle += 1
            self._number += 1
            name = f"{self.name}-{self._number}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            try:
                thread.start()  # under the lock, before close() can join it
            except RuntimeError as error:
                # The process may have no more threads: the existing ones run the jobs.
                self._idle -= 1
                _LOGGER.warning("%s could not be started: %s", name, error)
                return
            self._threads.add(thread)

    def _serve(self) -> None:
        me = threading.current_thread()
        self.enter()
        try:
            while not self._closed and self._turn():
                pass
        finally:
            with self._lock:
                self._threads.discard(me)
                if self._helper == me.ident:
                    self._helper = None

    def _turn(self) -> bool:
        """Wait for an event or job and handle it; False if this thread is not needed any more."""
        me = threading.get_ident()
        helping, done, wakeup = self._helper == me, self.done, self._wakeup
        latest, self._here.latest = self._here.latest, None
        if latest is None or self._idle < 2 or self._backlog or not latest.look():
            latest, events = None, self._poller.poll(LOOK_SECONDS if helping else IDLE_SECONDS, 1)
            for fd, event in events:
                if wakeup is not None and fd == wakeup.fd:
                    if not self._closed:  # otherwise it has to wake every thread
                        wakeup.clear()
                elif (latest := self._polled.get(fd)) is not None:
                    latest.ready(event)
        else:
            events = True
        backlog = len(self._backlog)
        if not backlog or self.running >= self.limit:
            if helping:
                self._helper = None
            return bool(events) or backlog > 0 or self._is_needed()
        if self.running == 0 or backlog == 1 or (helping and self.done == done):
            if helping:
                self._helper = None
            if backlog > 1:
                self.notify()  # another thread must notice if no job ends
            self._here.latest = latest
            self._work()
        else:
            with self._lock:
                if self._helper is None:
                    self._helper = me
        return True

    def _is_needed(self) -> bool:
        with self._lock:
            if self._idle < 2:
                return True
            self._idle -= 1
            return False

    def _work(self) -> None:
        here = self._here
        while not self._closed:
            with self._lock:
                if not self._backlog or self.running >= self.limit:
                    return
                job, nbytes = self._backlog.popleft()
                self.backlog_bytes -= nbytes
                self._idle -= 1
                self.running += 1
                alone = self._idle == 0
                short = self._is_short()
            if alone:
                self._spawn()
            if short is not None:
                short()
            here.running = True
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (the thread serves others as well)
                self._on_error(error)
            finally:
                del job
                here.running = False
                with self._lock:
                    self._idle += 1
                    self.running -= 1
                    self.done += 1

    def _is_short(self) -> Job | None:
        """Return the ``when_short`` callback once the backlog is short. The caller holds the
        lock.
        """
        if self._when_short is None:
            return None
        jobs, nbytes, then = self._when_short
        if len(self._backlog) > jobs or self.backlog_bytes > nbytes:
            return None
        self._when_short = None
        return then
