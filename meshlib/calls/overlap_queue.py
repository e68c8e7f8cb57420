"""Overlap: a task of a stream lets the next one begin before its own end.

Each has a thread of its own then, but only one of the two runs at a time. The later one begins
when the earlier one says so. The earlier one goes on when the later one waits for it. So neither
has to guard anything from the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from meshlib.calls.call_stream import CallStream, StreamThread


class OverlapQueue(CallStream):
    """A stream whose tasks may overlap. To the communicator it is the ``Turns`` of the calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._here = threading.local()
        self.overlapping: bool = False
        """Whether some task may ask for the next to begin: before, none needs to be an overlap."""

    def note_overlapping(self) -> None:
        """See ``Turns``."""
        self.overlapping = True

    def begin_next(self, most: int) -> bool:
        """See ``Turns``: the calling task and the next one have to be overlap tasks."""
        overlap: OverlapTask | None = getattr(self._here, "overlap", None)
        if overlap is None or overlap.has_next or not self._queue:
            return False
        next_ = self._queue[0]
        if not isinstance(next_, OverlapTask) or next_.nbytes > most:
            return False
        try:
            overlap.let_begin(next_, self._queue.popleft)
        except RuntimeError:  # no room for a thread
            return False
        return True

    def await_former(self) -> None:
        """See ``Turns``."""
        overlap: OverlapTask | None = getattr(self._here, "overlap", None)
        if overlap is not None:
            overlap.await_former()

    def walk(self, overlap: OverlapTask) -> None:
        """Make an overlap, in the calling thread."""
        self._here.overlap = overlap
        try:
            overlap.make()
        finally:
            self._here.overlap = None


class OverlapTask:
    """A task of ``stream``: ``task``, a call of ``nbytes``, which may begin early, and let the next
    begin.

    One that begins early leaves alone what the one before it works on until ``await_former``, and
    waits for nothing else before that. Then its turn has come, and ``on_turn()`` is told: that the
    one before it took long must not cost it its time.
    """

    __slots__ = (
        "_former",
        "_lane",
        "_next",
        "_on_turn",
        "_over",
        "_standing",
        "_task",
        "_thread",
        "nbytes",
    )

    def __init__(
        self,
        stream: OverlapQueue,
        task: Callable[[], None],
        nbytes: int = 0,
        on_turn: Callable[[], object] | None = None,
    ) -> None:
        self._lane = stream
        self._task = task
        self._on_turn = on_turn
        self.nbytes: int = nbytes
        self._former: OverlapTask | None = None
        self._standing = threading.Event()
        self._over = threading.Event()
        # The one that it has let begin; its own thread, if it began in another one's time.
        self._next: OverlapTask | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_next(self) -> bool:
        """Whether it has let the next one begin."""
        return self._next is not None

    def __call__(self) -> None:
        """Make the task and those that begin in this way before others end; return at their end."""
        self._lane.walk(self)
        overlap: OverlapTask | None = self
        while overlap is not None:
            overlap._over.wait()
            if overlap._thread is not None:
                overlap._thread.join()
            overlap._next, overlap = None, overlap._next

    def make(self) -> None:
        """Make the task."""
        try:
            self._task()
        finally:
            del self._task  # its arrays must not live until the next task comes
            self._over.set()
            self._standing.set()

    def let_begin(self, next_: OverlapTask, begun: Callable[[], object]) -> None:
        """Have ``next_`` begin in a thread of its own, and tell ``begun()``; return when it waits
        for this one, or is over. RuntimeError: there is no room for a thread.
        """
        thread = StreamThread(self._lane, lambda: self._lane.walk(next_))
        next_._former, next_._thread = self, thread
        try:
            thread.start()
        except BaseException:
            next_._former = next_._thread = None
            raise
        begun()
        self._next = next_
        next_._standing.wait()

    def await_former(self) -> None:
        """Wait for the end of the overlap that has let this one begin, if there is one."""
        former, self._former = self._former, None
        if former is not None:
            self._standing.set()
            former._over.wait()
            if self._on_turn is not None:
                self._on_turn()
