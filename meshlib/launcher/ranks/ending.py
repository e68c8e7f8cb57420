"""How a group of ranks is ended: told to, given time, then killed."""

from __future__ import annotations

import signal
import time

from meshlib.launcher.ranks.workers import WorkerGroup


class Ending:
    """Sends ``first`` after ``settle`` seconds and SIGKILL ``grace`` seconds later.

    ``first`` None: others have sent it. A rank that has already written its error file is left to
    end by itself until then: it may be saving what it knows. Call ``advance`` whenever ``due`` has
    passed.
    """

    def __init__(
        self, group: WorkerGroup, settle: float, grace: float, first: signal.Signals | None
    ) -> None:
        self._group = group
        self._first = first
        self._grace = grace
        self.due: float = time.monotonic() + (settle if first is not None else grace)
        self.advance()

    def settle_within(self, seconds: float) -> None:
        """Send the first signal after ``seconds`` at the latest."""
        if self._first is not None:
            self.due = min(self.due, time.monotonic() + seconds)

    def kill(self) -> None:
        """Send SIGKILL now."""
        self._first = None
        self.due = time.monotonic()
        self.advance()

    def advance(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        if now < self.due:
            return
        if self._first is None:
            self._group.signal(signal.SIGKILL)
            self.due = now + 1.0
            return
        for worker in self._group.running:
            if not worker.has_failed():
                worker.signal(self._first)
        self._first = None
        self.due = now + self._grace
