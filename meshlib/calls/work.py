"""``Work``: a call that was issued with ``async_op=True``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from meshlib.arrays.adapter import is_only_returned
from meshlib.arrays.ignored import UntakenResult
from meshlib.calls.future import End, Future, after
from meshlib.calls.lane import Continuations
from transport.deadline import Deadline, Timeout, to_seconds
from transport.errors import DistError

T = TypeVar("T")


class WorkResult(enum.IntEnum):
    """How a call ended, as ``Work.get_future_result`` tells it: c10d's numbers."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    UNKNOWN = 100


class Message(NamedTuple):
    """What a receive ends with: its result, and the global rank that sent it."""

    result: Any
    source: int


class Work(Generic[T]):
    """A collective or point-to-point call under way; ``describe()`` says which.

    ``continuations`` is where the callbacks of its future run: None, in the thread that ends it.
    A thread that sees an exception calls ``told()``. Messages name the line by ``where()``.
    A thread in the middle of an earlier call gets True from ``blocked()``.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        told: Callable[[], object] | None = None,
        continuations: Continuations | None = None,
        where: Callable[[], str] = lambda: "a call",
        blocked: Callable[[], bool] | None = None,
    ) -> None:
        self._describe = describe
        self._where = where
        self._future: Future[T] = Future(told, continuations, blocked)
        self._outcome: Any = None
        self._taken = False
        self._untaken: UntakenResult | None = None

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the call failed with, or None."""
        return self._future.exception()

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the call has ended; return True or raise its exception.

        ``timeout`` (seconds or "30s") bounds this wait, not the call (which has a deadline
        of its own): past it, ``WaitTimeoutError``, and the call goes on. None and 0 mean no bound,
        as in c10d.
        """
        bound = None if timeout is None or to_seconds(timeout) == 0 else timeout
        self._future.block(bound, self._describe)
        exception = self._future.exception()
        if exception is None:
            return True
        try:
            raise exception
        finally:
            del exception, self  # as Future.wait

    def synchronize(self) -> None:
        """Make the result usable by the caller: the same as ``wait()``."""
        self.wait()

    def result(self) -> T:
        """Return what the synchronous call would have returned. Waits for the end."""
        self.take()
        return self._future.wait()

    def source_rank(self) -> int:
        """Return the global rank that a receive's message came from (waits for it).

        Raises ValueError for a call that is not a receive.
        """
        self.wait()
        outcome = self._outcome
        if not isinstance(outcome, Message):
            raise ValueError(f"source_rank() of {self._describe()}: only a receive has a source")
        return outcome.source

    def get_future(self) -> Future[T]:
        """Return the future of the result."""
        self.take()
        return self._future

    def get_future_result(self) -> Future[WorkResult]:
        """Return a future of how the call ends, a ``WorkResult``; it never holds an exception."""
        after = Future[WorkResult]()
        self._future.at_once(lambda done: after.set_result(_how_it_ended(done)))
        return after

    def outcome(self) -> Any:
        """Wait for the end and return all of it: a ``Message`` for a receive."""
        self.take()
        self.wait()
        return self._outcome

    def finish(self, outcome: Any, completion: End | None = None) -> None:
        """Record a good end: what the call gave, and the end of what a device still does for it.

        For the group that runs the call.
        """
        self._outcome = outcome
        result = outcome.result if isinstance(outcome, Message) else outcome
        if is_only_returned(result) and not self._taken:
            self._untaken = UntakenResult(self, self._where())
        self._future.set_result(result, completion)

    def take(self) -> None:
        """Note that the result is taken, or in the program's hands already."""
        self._taken = True
        if self._untaken is not None:
            self._untaken.take()

    def fail(self, exception: BaseException) -> None:
        """Record a bad end. For the group that runs the call."""
        self._future.set_exception(exception)

    def __repr__(self) -> str:
        if not self.is_completed():
            state = "under way"
        else:
            state = "done" if self.is_success() else f"failed: {self.exception()!r}"
        return f"<Work {self._describe()}: {state}>"


class _Ends:
    """The ends of several calls on devices, as one ``End``."""

    def __init__(self, parts: Sequence[Future[Any]]) -> None:
        self._ends = [end for future in parts if (end := future.completion) is not None]

    def done(self) -> bool:
        return all(end.done() for end in self._ends)

    def wait(self, deadline: Deadline) -> bool:
        return all(end.wait(deadline) for end in self._ends)

    def join(self) -> None:
        for end in self._ends:
            end.join()


def collect_all(works: Sequence[Work[T] | None]) -> Work[list[T]]:
    """Return one ``Work`` of several: it ends when all of them have.

    Its result is the list of theirs; what it raises is what the first in the list raises that
    failed. None, which a call gives on a rank that is no member, is left out.

    Raises TypeError for anything else in ``works``, ValueError where nothing is left.
    """
    if not isinstance(works, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"works must be a list of Work, got {works!r}")
    for i, work in enumerate(works):
        if work is not None and not isinstance(work, Work):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"works[{i}] must be a Work or None, got {work!r}")
    parts = [work.get_future() for work in works if work is not None]
    if not parts:
        raise ValueError("works has no Work; expected at least one")
    names = [repr(work) for work in works]

    def tell() -> None:
        for part in parts:
            part.exception()

    # What follows on all runs where none of them has to wait for it.
    whole: Work[list[T]] = Work(
        lambda: f"all of {', '.join(names)}",
        tell,
        parts[0].continuations,
        blocked=lambda: any(part.is_blocked() for part in parts),
    )

    def end() -> None:
        failures = [part.failure for part in parts if part.failure is not None]
        if failures:
            whole.fail(failures[0])
        else:
            whole.finish([part.outcome for part in parts], _Ends(parts))

    note = after(len(parts), end)
    for part in parts:
        part.at_once(note)
    return whole


def _how_it_ended(future: Future[Any]) -> WorkResult:
    error = future.exception()
    if error is None:
        return WorkResult.SUCCESS
    if isinstance(error, TimeoutError):
        return WorkResult.TIMEOUT
    return WorkResult.COMM_ERROR if isinstance(error, DistError) else WorkResult.UNKNOWN
