"""``Work``: a call that was issued with ``async_op=True``."""

# Other files reach the private parts of Work through the functions below the class.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

from meshlib._arrays.adapter import is_only_returned
from meshlib._arrays.ignored import UntakenResult
from meshlib._calls.call_stream import ContinuationStream
from meshlib._calls.future import End, Future, after, at_once, awaited, block, joint
from transport._errors import DistError
from transport._waiting.deadline import Deadline, Timeout, to_seconds

T = TypeVar("T")


class WorkResult(enum.IntEnum):
    """The outcome of a call for ``Work.get_future_result``, with c10d's numbers."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    UNKNOWN = 100


class ReceivedMessage(NamedTuple):
    """The outcome of a receive: its result, and the global rank of the sender."""

    result: Any
    source: int


class Work(Generic[T]):
    """A collective or point-to-point call under way.

    ``describe()`` returns the call's description for messages, ``where()`` its source line. The
    callbacks of its future run on ``continuations``; if that is None, in the thread that ends the
    call. ``on_seen()`` is called when the program gets the exception. ``blocked()`` is True in a
    thread that is in the middle of an earlier call.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        on_seen: Callable[[], object] | None = None,
        continuations: ContinuationStream | None = None,
        where: Callable[[], str] = lambda: "a call",
        blocked: Callable[[], bool] | None = None,
    ) -> None:
        self._describe = describe
        self._where = where
        self._future: Future[T] = Future(on_seen, continuations, blocked)
        self._outcome: Any = None
        self._taken = False
        self._untaken: UntakenResult | None = None

    def is_completed(self) -> bool:
        """True if the call has ended, successfully or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """True if the call has ended successfully."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """Return the exception of the call, or None."""
        return self._future.exception()

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Wait until the call has ended; return True or raise its exception.

        ``timeout`` (seconds or "30s") limits this wait, not the call, which has its own deadline.
        When it passes, ``wait`` raises ``WaitTimeoutError`` and the call continues. None and 0 mean
        no limit, as in c10d.
        """
        bound = None if timeout is None or to_seconds(timeout) == 0 else timeout
        block(self._future, bound, self._describe)
        exception = self._future.exception()
        if exception is None:
            return True
        try:
            raise exception
        finally:
            del exception, self  # breaks the reference cycle, as Future.wait does

    def synchronize(self) -> None:
        """Wait for the call; the same as ``wait()``."""
        self.wait()

    def result(self) -> T:
        """Wait for the call; return the result of the synchronous call."""
        take(self)
        return self._future.wait()

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine of asyncio; return the same as ``result()``.

        The event loop continues meanwhile, and no thread waits. Cancelling the awaiting task ends
        its wait, not the call, which the other ranks also make. Raises RuntimeError outside an
        event loop with asyncio's interface.
        """
        take(self)
        return awaited(self._future, self._describe)

    def source_rank(self) -> int:
        """Return the global rank of the sender of a receive's message; wait for the message.

        Raises ValueError for a call that is not a receive.
        """
        self.wait()
        outcome = self._outcome
        if not isinstance(outcome, ReceivedMessage):
            raise ValueError(f"source_rank() of {self._describe()}: only a receive has a source")
        return outcome.source

    def get_future(self) -> Future[T]:
        """Return the future of the result."""
        take(self)
        return self._future

    def get_future_result(self) -> Future[WorkResult]:
        """Return a future of the call's ``WorkResult``; it never holds an exception."""
        after = Future[WorkResult]()
        at_once(self._future, lambda done: after.set_result(_how_it_ended(done)))
        return after

    def __repr__(self) -> str:
        if not self.is_completed():
            state = "under way"
        else:
            state = "done" if self.is_success() else f"failed: {self.exception()!r}"
        return f"<Work {self._describe()}: {state}>"


def outcome_of(work: Work[Any]) -> Any:
    """Wait for the end of ``work``; return its result, or a receive's ``ReceivedMessage``."""
    take(work)
    work.wait()
    return work._outcome


def finish(work: Work[Any], outcome: Any, completion: End | None = None) -> None:
    """Record a success: the ``outcome``, and the ``completion`` of work left on a device."""
    work._outcome = outcome
    result = outcome.result if isinstance(outcome, ReceivedMessage) else outcome
    if is_only_returned(result) and not work._taken:
        work._untaken = UntakenResult(work, work._where())
    work._future.set_result(result, completion)


def fail(work: Work[Any], exception: BaseException) -> None:
    """Record a failure."""
    work._future.set_exception(exception)


def take(work: Work[Any]) -> None:
    """Note that the program has taken the result or already holds it."""
    work._taken = True
    if work._untaken is not None:
        work._untaken.take()


class _Ends:
    """The completions of several calls on devices, as one ``End``."""

    def __init__(self, parts: Sequence[Future[Any]]) -> None:
        self._ends = [end for future in parts if (end := future._completion) is not None]

    def done(self) -> bool:
        return all(end.done() for end in self._ends)

    def wait(self, deadline: Deadline) -> bool:
        return all(end.wait(deadline) for end in self._ends)

    def join(self) -> None:
        for end in self._ends:
            end.join()


@overload
def collect_all(works: Sequence[Work[T] | None]) -> Work[list[T]]: ...
@overload
def collect_all(works: Sequence[Future[T]]) -> Future[list[Future[T]]]: ...
def collect_all(works: Any) -> Any:
    """Combine several ``Work``, or several ``Future``, into one that ends when all have ended.

    The result of the ``Work`` is the list of the results of ``works``; if some failed, it raises
    the exception of the first failed one in the list. None, which a call returns on a rank outside
    the group, is skipped. The value of the ``Future`` is the list of the futures, failed or not, as
    for ``torch.futures.collect_all``.

    Raises TypeError unless each is a Work or None, or each is a Future. Raises ValueError if there
    is no Work or Future.
    """
    if not isinstance(works, Sequence):
        raise TypeError(f"works must be a list of Work, or of Future, got {works!r}")
    given: Sequence[Any] = [one for one in works if one is not None]  # pyright: ignore[reportUnknownVariableType]
    if not given:
        raise ValueError("works has no Work; expected at least one")
    kind = Future if isinstance(given[0], Future) else Work
    for i, one in enumerate(works):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if not isinstance(one, kind) and (one is not None or kind is Future):
            expected = "Future" if kind is Future else "Work or None"
            raise TypeError(f"works[{i}] must be a {expected}, got {one!r}")
    return _collect_futures(given) if kind is Future else _collect_works(given)


def _collect_futures(futures: Sequence[Future[T]]) -> Future[list[Future[T]]]:
    combined = joint(futures)
    note = after(len(futures), lambda: combined.set_result(list(futures)))
    for future in futures:
        future.add_done_callback(note)
    return combined


def _collect_works(works: Sequence[Work[T]]) -> Work[list[T]]:
    parts = [work.get_future() for work in works]
    names = [repr(work) for work in works]
    return when_all(
        works, lambda: f"all of {', '.join(names)}", lambda: [part._value for part in parts]
    )


def when_all(
    works: Sequence[Work[Any]], describe: Callable[[], str], make: Callable[[], T]
) -> Work[T]:
    """Return a ``Work`` that calls ``make()`` after all of ``works``, and ends with its outcome.

    ``make`` runs in the thread that ends the last of ``works``; the next call of that group waits
    for it. If some failed, the ``Work`` raises the exception of the first failed one in the list.
    """
    parts = [work.get_future() for work in works]

    def mark_seen() -> None:
        for part in parts:
            part.exception()

    # Its continuations run on the continuation stream, so that no part waits for them.
    combined: Work[T] = Work(
        describe,
        mark_seen,
        parts[0]._continuations if parts else None,
        blocked=lambda: any(part._is_blocked() for part in parts),
    )

    def end() -> None:
        try:
            for part in parts:
                if part._exception is not None:
                    raise part._exception
            finish(combined, make(), _Ends(parts))
        except BaseException as error:  # noqa: BLE001 (the Work raises it)
            fail(combined, error)

    if not parts:
        end()
    note = after(len(parts), end)
    for part in parts:
        at_once(part, note)
    return combined


def _how_it_ended(future: Future[Any]) -> WorkResult:
    error = future.exception()
    if error is None:
        return WorkResult.SUCCESS
    if isinstance(error, TimeoutError):
        return WorkResult.TIMEOUT
    return WorkResult.COMM_ERROR if isinstance(error, DistError) else WorkResult.UNKNOWN
