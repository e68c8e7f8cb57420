"""``Fate``: what has become of a group."""

from __future__ import annotations

import threading
from copy import copy

from meshlib.calls.members import Members
from meshlib.events.events import Departures
from transport.condition import Condition, let_go
from transport.errors import DistError


class Fate:
    """What broke the group of ``members``, who of them has left, and whether it was closed.

    A thread holds ``lock`` to change it, or not to miss a change. The lock knows its thread: a
    signal may come while that has it, and its handler make a call.
    """

    def __init__(self, members: Members) -> None:
        self.members: Members = members
        self.lock: threading.RLock = threading.RLock()  # pyright: ignore[reportInvalidTypeForm]
        self.error: DistError | None = None
        """What broke it. Raised are copies: each thread adds a traceback of its own."""
        self.destroyed: bool = False
        self.departures: tuple[Departures, ...] = ()
        """Who has left the job in good order: members, and others."""
        self.absent: tuple[int, ...] = ()
        """The places of members that have left, made no call on the group, and never will."""
        self._broken = Condition(self.lock)

    @property
    def usable(self) -> bool:
        """Whether calls can be made on it: it is neither broken nor closed."""
        return self.error is None and not self.destroyed

    @property
    def departed(self) -> tuple[int, ...]:
        """The global ranks of members that have left the job in good order."""
        left: set[int] = set().union(*(departures.ranks for departures in self.departures))
        return tuple(rank for rank in self.members.ranks if rank in left)

    def seal(self, error: DistError) -> bool:
        """Say that ``error`` has broken the group; False: something else had. With ``lock``."""
        news = self.error is None
        if news:
            self.error = error
            self._broken.notify_all()
        return news

    def await_failure(self, timeout: float) -> DistError | None:
        """Return a copy of the error that broke the group, waiting up to ``timeout`` seconds."""
        if self.error is None and timeout > 0:
            try:
                with self.lock:
                    self._broken.wait_for(lambda: self.error is not None, timeout)
            except BaseException:
                let_go(self.lock)
                raise
        return None if self.error is None else copy(self.error)

    def unusable(self) -> Exception:
        """Return what a call on it raises."""
        if self.error is not None:
            return copy(self.error)
        return ValueError(f"{self.members} was destroyed; make a new one")

    def end_in_a_fork(self, error: DistError) -> None:
        """Have every call in this fork of the rank's process raise ``error``."""
        # Threads that are not here may have held it.
        self.lock = threading.RLock()
        self._broken = Condition(self.lock)
        self.error, self.destroyed = error, True
