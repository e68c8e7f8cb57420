"""The deadlines of one worker's calls."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from meshlib._calls.future import Future, at_once
from meshlib.rpc._calling.futures import OutgoingCall
from meshlib.rpc._errors import RpcTimeoutError
from meshlib.rpc._overdue.timer import TimerThread

STATE_SECONDS = 0.5
"""A callee must describe an overdue call within this time."""
_WRITE_SECONDS = 1.0
"""The shortest time between two writes of the flight record."""


class PendingCalls(Protocol):
    """The part of a ``Caller`` that ``Deadlines`` uses."""

    def pending(self) -> Sequence[OutgoingCall]:
        """Return the calls that wait for their replies."""
        ...

    def query(self, to: int, *what: object, seconds: float) -> Future[Any]:
        """Query the worker of rank ``to``; return the future of its answer."""
        ...

    def abandon(self, call: OutgoingCall, error: Exception) -> None:
        """End ``call`` with ``error``, without its reply."""
        ...


class Deadlines:
    """The deadlines of calls, enforced in ``timer``'s thread.

    ``write_record()`` writes this worker's flight record.
    """

    def __init__(self, timer: TimerThread, write_record: Callable[[], None]) -> None:
        self._timer = timer
        self._write_record = write_record
        self._lock = threading.Lock()
        self._next = math.inf
        self._written = -math.inf
        self._to_write = False

    def watch(self, due: float) -> None:
        """Schedule the end of overdue calls at ``due`` (monotonic seconds)."""
        if due < self._next:
            with self._lock:
                self._next = min(self._next, due)
            self._timer.call_at(due)

    def request_record(self) -> None:
        """Schedule a write of the flight record: this worker makes or serves an overdue call."""
        self._to_write = True
        self._timer.notify()

    def tick(self, caller: PendingCalls, describe: Callable[[int], str]) -> float:
        """End overdue calls of ``caller``; return the time of the next deadline.

        ``describe(rank)`` names a worker. Called by the timer.
        """
        now = time.monotonic()
        if self._to_write and now - self._written >= _WRITE_SECONDS:
            self._to_write, self._written = False, now
            self._write_record()
        if now >= self._next:
            # A concurrent call is either already pending, or watched afterwards.
            self._next = math.inf
            found = math.inf
            for call in caller.pending():
                if call.due > now:
                    found = min(found, call.due)
                elif not call.late:
                    call.late = True
                    self._find_out_why(caller, call, describe(call.to))
            with self._lock:
                self._next = min(self._next, found)
        return self._next

    def _find_out_why(self, caller: PendingCalls, call: OutgoingCall, who: str) -> None:
        """Query the callee about an overdue call, and end the call."""

        def end(state: str) -> None:
            text = f"{call.what} on {who} passed its deadline of {call.seconds:g} s: {state}"
            caller.abandon(call, RpcTimeoutError(text))

        def on_answer(done: Future[Any]) -> None:
            silent = f"{who} does not respond"
            end(silent if done.exception() is not None else done.value())

        if call.is_question:
            end("")
            return
        self.request_record()
        at_once(caller.query(call.to, "where", call.number, seconds=STATE_SECONDS), on_answer)
