"""Graceful shutdown: RPC ends when no worker has a running call.

The living worker of the lowest rank leads, and queries all others. Each worker answers when its
program has called ``shutdown`` and it is idle: no call waits for a reply, none is served, no
callback runs. The answer is a number that changes with every activity. If all workers answer twice
with the same numbers, there was a time in between at which all were idle. No message was in flight
then, because a call waits for each message. So none can become active again (Mattern's four
counters, 1987), and the leader informs all workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from meshlib._calls.future import WaitTimeoutError, block
from meshlib.rpc._calling.caller import Caller
from meshlib.rpc._calling.futures import OutgoingCall
from meshlib.rpc._errors import RpcTimeoutError
from meshlib.rpc._membership.directory import WorkerDirectory
from meshlib.rpc._overdue.timer import TimerThread
from transport._errors import DistError
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition, next_slice

_PAUSE_SECONDS = 0.01
Answer = Callable[[object], None]


class Shutdown:
    """One worker's part in the graceful shutdown.

    ``activity()`` returns a number that changes with every activity of the worker, or None while
    it is active; ``state()`` describes that activity.
    """

    def __init__(
        self,
        directory: WorkerDirectory,
        caller: Caller,
        timer: TimerThread,
        activity: Callable[[], int | None],
        state: Callable[[], str],
    ) -> None:
        self._directory = directory
        self._caller = caller
        self._timer = timer
        self._activity = activity
        self._state = state
        self._lock = threading.Lock()
        self._wanted = False
        self._waiting: list[Answer] = []
        self._down = False
        self._changed = Condition()

    def run(self, seconds: float) -> None:
        """Return when all living workers have called this and none has a running call.

        After ``seconds`` (0: never), raises ``RpcTimeoutError`` with the missing workers.
        """
        directory = self._directory
        self._wanted = True
        self._timer.notify()
        deadline = Deadline.after(seconds or threading.TIMEOUT_MAX)
        while not self._down:
            others = [r for r in range(directory.size) if r not in directory.lost]
            if others[0] == directory.rank:
                self._lead(others[1:], deadline)
                return
            with self._changed:
                late = deadline.expired
                self._changed.wait_for(lambda: self._down, min(deadline.remaining(), 0.2))
            if late and not self._down:
                who = directory.describe(others[0])
                raise _too_late(deadline, f"{who} has not completed it: {self._state()}")

    def on_question(self, what: str, answer: Answer) -> None:
        """Answer the leader: a query ``idle`` when this worker is idle, ``down`` at once."""
        if what == "down":
            answer(None)
            with self._changed:
                self._down = True
                self._changed.notify_all()
            return
        with self._lock:
            self._waiting.append(answer)
        self._timer.notify()

    def tick(self) -> float | None:
        """Answer the leader if idle; return the seconds until the timer's next call, or None."""
        if not self._waiting or not self._wanted:
            return None
        activity = self._activity()
        if activity is None:
            return _PAUSE_SECONDS
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer(activity)
        return None

    def _lead(self, others: list[int], deadline: Deadline) -> None:
        before: dict[int, object] | None = None
        while True:
            numbers = self._wave("idle", others, deadline)
            numbers[self._directory.rank] = self._await_own(deadline)
            if numbers == before:
                break
            before = numbers
        self._wave("down", others, deadline)

    def _wave(self, what: str, others: list[int], deadline: Deadline) -> dict[int, object]:
        caller, describe = self._caller, self._directory.describe
        calls: dict[int, OutgoingCall] = {}
        for rank in others:
            try:
                caller.connect(rank, max(deadline.remaining(), 0.1))
            except RpcTimeoutError as error:
                raise _too_late(deadline, f"{describe(rank)} was not reached in time") from error
            except DistError:
                continue  # lost
            calls[rank] = caller.query(rank, what, seconds=0)
        answers: dict[int, object] = {}
        for rank, call in calls.items():
            with suppress(WaitTimeoutError):
                block(call, deadline.remaining(), lambda: "shutdown")
            if not call.done():
                missing = ", ".join(describe(r) for r, c in calls.items() if not c.done())
                why = f"{missing} have not called it or still have running calls"
                raise _too_late(deadline, why)
            if call.exception() is None:
                answers[rank] = call.value()
        return answers

    def _await_own(self, deadline: Deadline) -> int:
        while (activity := self._activity()) is None:
            if deadline.expired:
                raise _too_late(deadline, self._state())
            time.sleep(next_slice(_PAUSE_SECONDS))
        return activity


def _too_late(deadline: Deadline, why: str) -> RpcTimeoutError:
    return RpcTimeoutError(f"shutdown() was not complete after {deadline.seconds:g} s: {why}")
