"""The library without its always-on checks, to measure what they cost. For nothing else.

What is left out: the flight record (the search for the user's line, the times, the thread), the
header (all calls have the same 32 bytes) and, in shared memory, its comparison. What is left in:
the order of calls, deadlines, the handling of failures, the checks of arguments; and the 32 bytes
themselves, which a TCP frame compares together with its length.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import time
from typing import Any

import transport._shm.communicator
from meshlib._calls.call_queue import CallQueue
from meshlib._calls.fast_path import SHORT
from meshlib._calls.spec import CallSpec, Run
from meshlib._groups import process_group
from meshlib._recording.recorder import COLLECTIVE
from transport._calls.call import Call
from transport._calls.header import CallHeader
from transport._errors import DistError
from transport._shm.calls import Calls
from transport._waiting.deadline import Deadline, Timeout, to_seconds

_HEADER = CallHeader(0, 0, 0, 0, 0, 0).pack()


class _UncheckedCall(Call):
    """A call whose header is that of every other."""

    __slots__ = ("_seconds", "_started")

    def __init__(self, seconds: float) -> None:
        self.packed = _HEADER
        self.sync = True
        self.waiting_for = None
        self.completion = None
        self._seconds = seconds
        self._started = time.monotonic()

    @property
    def deadline(self) -> Deadline:
        """See ``Record.deadline``."""
        return Deadline(self._started + self._seconds, self._seconds)


class UncheckedCallQueue(CallQueue):
    """A call queue that neither records nor numbers calls; for synchronous collectives."""

    def issue(self, spec: CallSpec, async_op: bool = False, timeout: Timeout | None = None) -> Any:
        """See ``CallQueue.issue``: this is what it would be without checks."""
        seconds = self.members.seconds if timeout is None else to_seconds(timeout)
        if spec.device not in self.members.backends:
            raise ValueError(f"{self} has no backend for arrays on {spec.device!r}")
        if self.context.observers:
            raise RuntimeError("unchecked calls cannot be observed")
        state, stream = self.state, self.streams.collectives
        with state.lock:
            if not state.usable:
                raise state.unusable()
            state.order.sequence += 1
            if async_op or spec.peer != COLLECTIVE or not stream.try_enter():
                raise RuntimeError("unchecked calls are synchronous collectives of one thread")
            if self.context.log.detailed:
                raise RuntimeError("unchecked calls are not logged")
        try:
            result = self._run_unchecked(spec.run, _UncheckedCall(seconds), spec.device)
            if self.state.fast_path is None and spec.kind in SHORT:
                self.open_fast_path(met=True)
                if self.state.fast_path is not None:
                    self.state.fast_path.checked = False
        finally:
            stream.leave()
        return result

    def _run_unchecked(self, run: Run, call: Call, device: str) -> Any:
        if self.state.error is not None or self.state.absent:
            raise self.state.unusable()
        try:
            communicator = self.state.communicators.get(device) or self.state.communicator(device)
            return run(communicator, call)
        except DistError as error:
            self.failure.fail(error)
            raise


class UncheckedCalls(Calls):
    """Calls that take every member's word for being in the same one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.native.compares = 0


def install() -> None:
    """Have this process use these from now on, before ``init_process_group``."""
    setattr(process_group, "CallQueue", UncheckedCallQueue)  # noqa: B010
    setattr(transport._shm.communicator, "Calls", UncheckedCalls)  # noqa: B010
