"""Legs: tasks of a lane of which one lets the next begin before its own end.

Each has a thread of its own then, but only one of the two runs at a time: the later one begins
when the earlier one says so, which goes on when the later one waits for it. So neither has to guard
anything from the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from meshlib.calls.lane import Lane, LaneThread


class Leg:
    """``task`` (see ``Lane``), a call of ``nbytes``, which may begin early, and let the next begin.

    One that begins early leaves alone what the one before it works on until ``await_former``, and
    waits for nothing else before that.
    """

    __slots__ = ("_former", "_over", "_standing", "_task", "nbytes", "next", "thread")

    def __init__(self, task: Callable[[], None], nbytes: int = 0) -> None:
        self._task = task
        self.nbytes = nbytes
        self._former: Leg | None = None
        self._standing = threading.Event()
        self._over = threading.Event()
        self.next: Leg | None = None
        """The one that it has let begin."""
        self.thread: threading.Thread | None = None
        """Its own, if it began in another one's time."""

    def __call__(self) -> None:
        """Make the task."""
        try:
            self._task()
        finally:
            del self._task  # its arrays must not live until the next task comes
            self._over.set()
            self._standing.set()

    def let_begin(self, next_: Leg, start: Callable[[Leg], None]) -> None:
        """Have ``start`` start a thread that makes ``next_``; return when that waits for this one.

        Or is over.
        """
        next_._former = self
        start(next_)
        self.next = next_
        next_._standing.wait()

    def await_former(self) -> None:
        """Wait for the end of the leg that has let this one begin, if there is one."""
        former, self._former = self._former, None
        if former is not None:
            self._standing.set()
            former._over.wait()

    def await_all(self) -> None:
        """Wait for the end of this leg and of all that followed it in this way."""
        leg: Leg | None = self
        while leg is not None:
            leg._over.wait()
            if leg.thread is not None:
                leg.thread.join()
            leg.next, leg = None, leg.next


class LegLane(Lane):
    """A lane whose tasks may be legs. Those of a leg's thread are ``Turns`` of its communicator."""

    def __init__(self, name: str, enter: Callable[[], None] | None = None) -> None:
        super().__init__(name, enter)
        self._here = threading.local()

    def begin_next(self, most: int) -> bool:
        """See ``Turns``: the calling task and the next one have to be legs."""
        leg: Leg | None = getattr(self._here, "leg", None)
        if leg is None or leg.next is not None or not self._queue:
            return False
        next_ = self._queue[0]
        if not isinstance(next_, Leg) or next_.nbytes > most:
            return False
        try:
            leg.let_begin(next_, self._begin)
        except RuntimeError:  # no room for a thread
            return False
        return True

    def await_former(self) -> None:
        """See ``Turns``."""
        leg: Leg | None = getattr(self._here, "leg", None)
        if leg is not None:
            leg.await_former()

    def _make(self, task: Callable[[], None]) -> None:
        if isinstance(task, Leg):
            self._walk(task)
            task.await_all()
        else:
            task()

    def _begin(self, leg: Leg) -> None:
        thread = LaneThread(self, lambda: self._walk(leg))
        thread.start()
        leg.thread = thread
        self._queue.popleft()

    def _walk(self, leg: Leg) -> None:
        self._here.leg = leg
        try:
            leg()
        finally:
            self._here.leg = None
