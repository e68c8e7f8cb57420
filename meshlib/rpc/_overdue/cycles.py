"""Cycles of calls that wait for each other.

A function that waits for a call, or for an object that is being made, waits for the function that
serves the call or makes the object. The detector follows a call that has waited for a second from
worker to worker. If the chain leads back to the call twice over the same calls, there was a time at
which all of them waited, so none can continue.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple

from meshlib._calls.future import Future
from meshlib.rpc._calling.caller import Caller
from meshlib.rpc._calling.execution import CYCLE_CHECK_SECONDS, CallId, Execution, ServedCall
from meshlib.rpc._calling.futures import OutgoingCall, RpcFuture, name_of, settle
from meshlib.rpc._errors import WaitCycleError
from meshlib.rpc._membership.directory import WorkerDirectory
from transport._errors import DistError

_AGAIN_SECONDS = 2.0
_STEP_SECONDS = 1.0
_MOST_STEPS = 1000


class WaitStep(NamedTuple):
    """A waiting function: its worker and call, the awaited call or object, and the seconds."""

    worker: int
    call: CallId
    function: str
    awaited: str
    seconds: float
    next_worker: int
    next_call: CallId


class CycleDetector:
    """A detector of the cycles of calls that pass through one worker."""

    def __init__(self, directory: WorkerDirectory, execution: Execution, caller: Caller) -> None:
        self._directory = directory
        self._execution = execution
        self._caller = caller
        self._followed: dict[CallId, float] = {}

    def tick(self) -> float | None:
        """Follow the calls that have waited for a second. Return the seconds until the next tick,
        or None if no call waits. Called by the timer.
        """
        now = time.monotonic()
        waiting = [call for call in list(self._execution.calls.values()) if call.waits_for]
        self._followed = {call.id: self._followed.get(call.id, 0.0) for call in waiting}
        for call in waiting:
            if now - call.waits_since < CYCLE_CHECK_SECONDS:
                continue
            if now - self._followed[call.id] >= _AGAIN_SECONDS:
                self._followed[call.id] = now
                self._execution.threads.submit(lambda it=call: self._follow(it))
        return CYCLE_CHECK_SECONDS / 2 if waiting else None

    def step(self, call_id: CallId) -> WaitStep | None:
        """Return the wait of a call that this worker serves; None: it awaits no call or object."""
        call = self._execution.calls.get(call_id)
        awaited = call.waits_for if call is not None else None
        if call is None or not isinstance(awaited, RpcFuture) or awaited.done():
            return None
        me, seconds, name = self._directory.rank, time.monotonic() - call.waits_since, call.func
        if isinstance(awaited, OutgoingCall):
            what = f"{awaited.what} on {self._directory.describe(awaited.to)}"
            worker, following = awaited.to, (me, awaited.number)
        elif awaited.object is not None:
            what, worker, following = "an object that is being made", me, awaited.object
        else:
            return None
        return WaitStep(me, call_id, name_of(name), what, seconds, worker, following)

    def _follow(self, call: ServedCall) -> None:
        awaited = call.waits_for
        with suppress(DistError):
            first = self._way_back(call.id)
            if first is None:
                return
            again = self._way_back(call.id)
            if again is not None and [s.call for s in first] == [s.call for s in again]:
                self._break(awaited, again)

    def _way_back(self, call_id: CallId) -> list[WaitStep] | None:
        """Return the steps from a call that this worker serves back to itself; None: no cycle."""
        me = self._directory.rank
        steps: list[WaitStep] = []
        worker, at = me, call_id
        while len(steps) < _MOST_STEPS:
            found = self.step(at) if worker == me else self._query(worker, at)
            if found is None:
                return None
            steps.append(found)
            worker, at = found.next_worker, found.next_call
            if (worker, at) == (me, call_id):
                return steps
            if any((s.worker, s.call) == (worker, at) for s in steps):
                return None  # a cycle of other workers, which detect it
        return None

    def _query(self, worker: int, call_id: CallId) -> WaitStep | None:
        self._caller.connect(worker, _STEP_SECONDS)
        answer: Any = self._caller.query(worker, "waits", call_id, seconds=_STEP_SECONDS).wait()
        return None if answer is None else WaitStep(*answer)

    def _break(self, awaited: Future[Any] | None, steps: list[WaitStep]) -> None:
        rows = [
            f"  {self._directory.describe(s.worker)}: {s.function} waits for {s.awaited}, for"
            f" {s.seconds:.1f} s"
            for s in steps
        ]
        text = "these calls wait for each other forever:\n" + "\n".join(rows)
        if isinstance(awaited, OutgoingCall):
            self._caller.abandon(awaited, WaitCycleError(text))
        elif awaited is not None:
            settle(awaited, None, WaitCycleError(text))
