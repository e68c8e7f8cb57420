"""The threads of calls and callbacks, and the calls that they serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshlib._calls.call_stream import ContinuationStream
from meshlib._calls.future import Future
from meshlib.rpc._calling.loopback import AnyConnection
from transport._channel.threads import ThreadPool

CYCLE_CHECK_SECONDS = 1.0
"""A call that has waited this long is checked for a cycle."""

CallId = tuple[int, int]
"""The caller's rank, and its number for the call."""


@dataclass(slots=True, eq=False)
class ServedCall:
    """A call that this worker serves, or that waits for a thread of it."""

    id: CallId
    connection: AnyConnection
    nbytes: int
    arrived: float
    parent: CallId | None = None
    """The call whose function made this one."""
    func: object = None
    sent: dict[str, Any] | None = None
    """Data of the request's context carriers, by name."""
    thread: int | None = None
    begun: float = 0.0
    cancelled: str | None = None
    waits_for: Future[Any] | None = None
    """The future that the call's thread waits for, or whose value the call returns."""
    waits_since: float = 0.0
    result: Future[Any] | None = None
    """The future of the object of this worker that the result becomes."""


class _ThreadCall(threading.local):
    call: ServedCall | None = None


class Execution:
    """The execution of calls and callbacks as jobs of ``threads``.

    ``call_timer(moment)`` schedules a search for cycles of waiting calls at ``moment``.
    """

    def __init__(self, threads: ThreadPool, call_timer: Callable[[float], None]) -> None:
        self.threads = threads
        self.callbacks: ContinuationStream = Callbacks(threads)
        self.calls: dict[CallId, ServedCall] = {}
        """The calls that this worker serves, by id."""
        self._call_timer = call_timer
        self.here: _ThreadCall = _ThreadCall()
        """The call that the current thread serves (thread-local)."""

    @property
    def current(self) -> ServedCall | None:
        """The call that the calling thread serves, or None."""
        return self.here.call

    @contextmanager
    def waiting(self, future: Future[Any]) -> Generator[None]:
        """Let other jobs run while the calling thread, in a job, waits for ``future``."""
        call = self.current
        if call is None:
            with self.threads.slot_released():
                yield
            return
        before = call.waits_for, call.waits_since
        call.waits_for, call.waits_since = future, time.monotonic()
        self._call_timer(call.waits_since + CYCLE_CHECK_SECONDS)
        try:
            with self.threads.slot_released():
                yield
        finally:
            call.waits_for, call.waits_since = before

    def has_begun_all_of(self, caller: int) -> bool:
        """Return whether all received requests of the worker ``caller`` are unpickled."""
        return all(
            call.func is not None for call in list(self.calls.values()) if call.id[0] == caller
        )

    def has_begun(self, call_id: CallId) -> bool:
        """Return whether a received request is unpickled, or its call has ended."""
        call = self.calls.get(call_id)
        return call is None or call.func is not None

    def cancel(self, of: Callable[[ServedCall], bool], why: str) -> None:
        """Mark the calls for which ``of`` returns true as cancelled, for the reason ``why``."""
        for call in list(self.calls.values()):
            if of(call):
                call.cancelled = why


class Callbacks(ContinuationStream):
    """A stream that runs callbacks of remote calls in the worker's threads, where they may wait."""

    def __init__(self, threads: ThreadPool) -> None:
        super().__init__("rpc-callbacks")
        self._threads = threads

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` in one of the threads."""
        self._threads.submit(task)

    def is_current(self) -> bool:
        """Return False: the calling thread may have to read replies."""
        return False

    def is_idle(self) -> bool:
        """Return True: a callback that is added to a done future runs at once."""
        return True
