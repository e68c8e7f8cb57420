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

import transport.shm.communicator
from meshlib.calls.shortcut import SHORT
from meshlib.diagnosis.recorder import COLLECTIVE
from meshlib.groups.host import Run
from meshlib.groups.process_group import ProcessGroup
from meshlib.job import world
from transport.call import NO_ROOT, Call, CallHeader, Kind
from transport.deadline import Deadline, Timeout, to_seconds
from transport.errors import DistError
from transport.shm.board.board import Board

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


class UncheckedGroup(ProcessGroup):
    """A group whose door neither records nor numbers calls; for synchronous collectives."""

    def issue(
        self,
        kind: Kind,
        run: Run,
        device: str = "cpu",
        elements: int = 0,
        dtype: int = 0,
        op: int = 0,
        root: int = NO_ROOT,
        extra: int = 0,
        nbytes: int = 0,
        peer: int = COLLECTIVE,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """See ``ProcessGroup.issue``: this is what it would be without checks."""
        if device not in self.backends:
            raise ValueError(f"{self} has no backend for arrays on {device!r}")
        if self.world.observers:
            raise RuntimeError("unchecked calls cannot be observed")
        seconds = self.seconds if timeout is None else to_seconds(timeout)
        lane = self._lanes.collectives
        with self._lock:
            if self._failure is not None or self._destroyed:
                raise self._unusable()
            self._order.sequence += 1
            if async_op or peer != COLLECTIVE or not lane.try_enter():
                raise RuntimeError("unchecked calls are synchronous collectives of one thread")
            if self.world.log.detailed:
                raise RuntimeError("unchecked calls are not logged")
        try:
            result = self._run_unchecked(run, _UncheckedCall(seconds), device)
            if not self._has_looked and kind in SHORT:
                self._open_shortcut()
                if self.shortcut is not None:
                    self.shortcut.checked = False
        finally:
            lane.leave()
        return result

    def _run_unchecked(self, run: Run, call: Call, device: str) -> Any:
        if self._failure is not None or self._absent:
            raise self._unusable()
        try:
            communicator = self._communicators.get(device) or self._communicator(device)
            return run(communicator, call)
        except DistError as error:
            self.fail(error)
            raise


class UncheckedBoard(Board):
    """A board that takes every member's word for being in the same call."""

    def meet(self, call: Call) -> None:
        """See ``Board.meet``."""
        self.reach_all(call, 1)


def install() -> None:
    """Have this process use these from now on, before ``init_process_group``."""
    setattr(world, "ProcessGroup", UncheckedGroup)  # noqa: B010
    setattr(transport.shm.communicator, "Board", UncheckedBoard)  # noqa: B010
