"""How ranks are ended: told to, given time, then killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

SETTLE_SECONDS = 0.8
"""What the others get, when a rank has failed, to notice it and end by themselves."""
SETTLE_AFTER_ECHO_SECONDS = 1.0
"""The same when the first to end did so because of another, which has yet to say why."""
FAILURE_GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL when a rank has failed, or after Ctrl-C."""
SIGNAL_GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL when the launcher itself was told to end: ranks may be saving."""
SLURM_GRACE_SECONDS = 25.0
"""The same under Slurm, which kills everything KillWait (30 s) after its own SIGTERM."""


class Endable(Protocol):
    """A rank's process, as far as it is ended."""

    def has_failed(self) -> bool:
        """Whether the rank has ended badly, or has said why it is about to."""
        ...

    def signal(self, number: signal.Signals, /) -> None:
        """Send ``number``: what happens from now on is not the rank's own failure."""
        ...


class Ending:
    """Sends ``first`` after ``settle`` seconds and SIGKILL ``grace`` seconds later.

    ``running`` returns those of the ranks that have not ended. ``first`` None: others have sent it.
    A rank that has already said why it fails is left to end by itself until then: it may be saving
    what it knows. Call ``advance`` whenever ``due`` has passed.
    """

    def __init__(
        self,
        running: Callable[[], Sequence[Endable]],
        settle: float,
        grace: float,
        first: signal.Signals | None,
    ) -> None:
        self.running = running
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
            for rank in self.running():
                rank.signal(signal.SIGKILL)
            self.due = now + 1.0
            return
        for rank in self.running():
            if not rank.has_failed():
                rank.signal(self._first)
        self._first = None
        self.due = now + self._grace
