"""``Future``: the outcome of a call that may not have ended."""

# Other files access the private parts through the functions at the end.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from meshlib._calls.call_stream import ContinuationStream
from transport._errors import DistBackendError
from transport._net.fork import own_pid, refusal
from transport._waiting.deadline import Deadline, Timeout
from transport._waiting.interrupts import Condition, run_outside

_LOGGER = logging.getLogger("meshlib")

T = TypeVar("T")
U = TypeVar("U")


class WaitTimeoutError(DistBackendError, TimeoutError):
    """``wait(timeout)`` timed out. The call continues, and its group is not broken."""


class End(Protocol):
    """The end of pending work on a device: a ``Completion``, or several."""

    def done(self) -> bool:
        """True if the work is done."""
        ...

    def wait(self, deadline: Deadline) -> bool:
        """Wait for the work on the host; return False past the deadline."""
        ...

    def join(self) -> None:
        """Make the caller's current stream wait for the work."""
        ...


class Future(Generic[T]):
    """The outcome of a call: a value or an exception, once. Methods as ``torch.futures.Future``.

    A coroutine of asyncio can ``await`` it. ``continuations`` is the stream that runs its
    callbacks. ``on_seen()`` is called when the program gets the exception; ``blocked`` is as for
    ``Work``.
    """

    def __init__(
        self,
        on_seen: Callable[[], object] | None = None,
        continuations: ContinuationStream | None = None,
        blocked: Callable[[], bool] | None = None,
    ) -> None:
        self._on_seen = on_seen
        self._continuations = continuations
        self._blocked = blocked
        self._pid = own_pid()
        # Before the outcome: the awaited future, and whether its callback has started.
        self._source: Future[Any] | None = None
        self._under_way = False
        self._ready = Condition()
        self._done = False
        self._value: Any = None
        self._exception: BaseException | None = None
        self._first: list[Callable[[Future[T]], object]] = []
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._completion: End | None = None

    def done(self) -> bool:
        """True if the outcome is known and no device still works for it."""
        return self._done and (self._completion is None or self._completion.done())

    def wait(self, timeout: Timeout | None = None) -> T:
        """Wait for the outcome (at most ``timeout`` seconds); return it or raise it.

        Raises ``WaitTimeoutError`` past ``timeout``, and RuntimeError in a callback for which this
        future itself waits. Raises ``DistBackendError`` in a fork of the process that made the
        call, and in a signal handler that has interrupted an earlier call.
        """
        self._block(timeout, lambda: "the future")
        exception = self.exception()
        if exception is None:
            return self._value
        try:
            raise exception
        finally:
            # The exception's traceback refers to this frame. Breaking the cycle frees the callers'
            # objects without the garbage collector.
            del exception, self

    def _block(self, timeout: Timeout | None, what: Callable[[], str]) -> None:
        """Wait for the outcome without reading it; ``what()`` names it in the error.

        For an outcome on a device, the caller's current stream waits, not the host. With a
        ``timeout`` (seconds, a timedelta or "30s") the host waits, and raises ``WaitTimeoutError``
        past it.
        """
        if self._done and self._completion is None:
            return
        self._check_process(what)
        if self._is_blocked():
            raise DistBackendError(
                f"{what()} comes after a call that this thread is in the middle of: a signal"
                " handler cannot wait for it; expected the handler to return first"
            )
        deadline = None if timeout is None else Deadline.after(timeout)
        stream = _stream_of_this_thread()
        if stream is not None:
            self._wait_in_a_callback(stream, what, deadline)
        else:
            self._wait(what, deadline)
        if self._completion is not None:
            if deadline is not None and not self._completion.wait(deadline):
                raise WaitTimeoutError(f"{what()} is not done after {deadline.seconds:g} s")
            self._completion.join()

    def _check_process(self, what: Callable[[], str]) -> None:
        """Raise ``DistBackendError`` in a fork of the process that made the call."""
        if why := refusal(what(), self._pid, "the wait in that process"):
            raise DistBackendError(why)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine of asyncio; return the value or raise the exception.

        The event loop continues meanwhile, and no thread waits. Cancelling the awaiting task ends
        its wait, not the call. Raises RuntimeError outside an event loop with asyncio's interface,
        and in a callback for which this future itself waits.
        """
        return self._await(lambda: "the future")

    def _await(self, what: Callable[[], str]) -> Generator[Any, None, T]:
        if not self._done:
            import asyncio  # here, because importing it is slow

            self._check_process(what)
            stream = _stream_of_this_thread()
            # Unlike wait(), an event loop cannot run the continuations in between.
            if stream is not None and (
                self._needs(stream) or (self._continuations is stream and self._source is not None)
            ):
                raise _after_the_callback(what)
            loop = asyncio.get_running_loop()
            ended = loop.create_future()

            def end() -> None:
                if not ended.done():  # its task may have been cancelled
                    ended.set_result(None)

            def note(_: Future[T]) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(end)

            self._at_once(note)
            yield from ended
        return self.wait()

    def _wait(self, what: Callable[[], str], deadline: Deadline | None) -> None:
        with self._ready:
            # Without a timeout the wait still ends, because the call has a deadline.
            left = None if deadline is None else deadline.remaining()
            if not self._ready.wait_for(lambda: self._done, left) and deadline is not None:
                raise WaitTimeoutError(f"{what()} is not done after {deadline.seconds:g} s")

    def _wait_in_a_callback(
        self, stream: ContinuationStream, what: Callable[[], str], deadline: Deadline | None
    ) -> None:
        """Wait in a task of ``stream``, which may be needed for the outcome."""
        before, stream.awaited = stream.awaited, self
        try:
            if self._needs(stream):
                raise _after_the_callback(what)
            if self._continuations is stream and self._source is not None:
                stream.run_until(lambda: self._done, deadline)
            self._wait(what, deadline)
        finally:
            stream.awaited = before

    def _needs(self, stream: ContinuationStream) -> bool:
        """True if the outcome depends on the end of the task that ``stream`` is running."""
        future, seen = self, set[Future[Any]]()
        while future not in seen:
            seen.add(future)
            runs, origin = future._continuations, future
            while origin._source is not None and not origin._under_way:
                origin = origin._source
            if runs is stream and origin._under_way:
                return True
            # A continuation on another stream waits for that stream's running task.
            if runs is None or runs is stream or future._source is None:
                return False
            awaited = runs.awaited
            if not isinstance(awaited, Future) or awaited._done:
                return False
            future = awaited
        return False

    def _is_blocked(self) -> bool:
        """True if the calling thread is in the middle of an earlier call."""
        return not self._done and self._blocked is not None and self._blocked()

    def value(self) -> T:
        """Return the value, or raise the exception, of a future that is done.

        Raises RuntimeError if it is not done.
        """
        if not self._done:
            raise RuntimeError("the future is not done; wait() for it first")
        return self.wait()

    def exception(self) -> BaseException | None:
        """Return the exception of the call; None if it succeeded or has not ended."""
        if self._exception is not None and self._on_seen is not None:
            self._on_seen()
        return self._exception

    def set_result(self, result: T, completion: End | None = None) -> None:
        """Set the value to ``result``. Raises RuntimeError if there is already an outcome.

        ``completion`` is the end of a device's pending work for it.
        """
        self._settle(result, None, completion)

    def set_exception(self, exception: BaseException) -> None:
        """Set the outcome to ``exception``.

        Raises RuntimeError if there is already an outcome, TypeError for a value that is not an
        exception.
        """
        if not isinstance(exception, BaseException):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"exception must be an exception, got {exception!r}")
        self._settle(None, exception)

    def then(self, callback: Callable[[Future[T]], U]) -> Future[U]:
        """Return a future for ``callback(self)``, called once this one is done.

        The callbacks of a group's calls run one after the other, in the order in which the calls
        ended, in a separate thread. If this future is done and no earlier callback is pending,
        ``callback`` runs now, in the caller's thread. Callbacks may make calls and wait for them,
        also on the same group. The ranks agree on the order of these calls only if their programs
        make no other calls meanwhile.

        Raises TypeError if ``callback`` is not callable.
        """
        check_callable(callback)
        after: Future[U] = self._follower()
        after._source = self

        def run(done: Future[T]) -> None:
            after._under_way = True
            try:
                result = run_outside(callback, done)
            except BaseException as error:  # its waiting threads need an outcome
                after.set_exception(error)
                if not isinstance(error, Exception):  # an interrupt must also reach this thread
                    raise
            else:
                after.set_result(result)

        self.add_done_callback(run)
        return after

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a future cannot be pickled: it belongs to this process; wait() for it first, or"
            " return it from a function with async_execution"
        )

    def _follower(self) -> Future[Any]:
        """Return the future that ``then`` fills."""
        return Future[Any](continuations=self._continuations)

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Call ``callback(self)`` once this future is done, in the same order as ``then``.

        The result is ignored; an exception is logged. Raises TypeError if ``callback`` is not
        callable.
        """
        check_callable(callback)
        stream = self._continuations
        if self._keep(self._callbacks, callback):
            return
        # Earlier callbacks run first.
        if stream is None or stream.is_current() or stream.is_idle():
            callback(self)
        else:
            stream.submit(lambda: self._call([callback]))

    def _at_once(self, callback: Callable[[Future[T]], object]) -> None:
        if not self._keep(self._first, callback):
            callback(self)

    def _keep(
        self,
        callbacks: list[Callable[[Future[T]], object]],
        callback: Callable[[Future[T]], object],
    ) -> bool:
        """Store ``callback`` until there is an outcome; return False if there already is one."""
        with self._ready:
            if not self._done:
                callbacks.append(callback)
            return not self._done

    def _settle(
        self, value: Any, exception: BaseException | None, completion: End | None = None
    ) -> None:
        with self._ready:
            if self._done:
                raise RuntimeError("the future has an outcome already")
            self._value, self._exception = value, exception
            self._completion = completion
            self._done = True
            self._source = None
            first, callbacks = self._first, self._callbacks
            self._first = self._callbacks = []
            self._ready.notify_all()
            stream = self._continuations
            inline = stream is None or stream.is_current()
            if callbacks and stream is not None and not inline:
                stream.submit(lambda: self._call(callbacks))
        for callback in first:
            callback(self)
        if inline:
            self._call(callbacks)

    def _call(self, callbacks: list[Callable[[Future[T]], object]]) -> None:
        for callback in callbacks:
            try:
                run_outside(callback, self)
            except BaseException:  # SystemExit would end the stream's thread
                # No caller can get the exception, and the other callbacks must still run.
                _LOGGER.exception("a callback of a future raised")


def _stream_of_this_thread() -> ContinuationStream | None:
    """Return the stream whose task the calling thread is running."""
    stream = getattr(threading.current_thread(), "stream", None)
    return stream if isinstance(stream, ContinuationStream) else None


def _after_the_callback(what: Callable[[], str]) -> RuntimeError:
    return RuntimeError(
        f"a callback waits for {what()}, which cannot complete before that callback ends; expected"
        " then() instead of a wait"
    )


def check_callable(callback: object) -> None:
    """Raise TypeError unless ``callback`` is callable."""
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {callback!r}")


def block(future: Future[Any], timeout: Timeout | None, what: Callable[[], str]) -> None:
    """Wait for the outcome of ``future`` without reading it; ``what()`` names it in the error.

    Raises ``WaitTimeoutError`` past ``timeout``.
    """
    future._block(timeout, what)


def awaited(future: Future[T], what: Callable[[], str]) -> Generator[Any, None, T]:
    """Await ``future`` in a coroutine; ``what()`` names it in errors."""
    return future._await(what)


def at_once(future: Future[T], callback: Callable[[Future[T]], object]) -> None:
    """Call ``callback(future)`` in the thread that completes ``future``.

    ``callback`` must not block or raise: the group's next call waits for it.
    """
    future._at_once(callback)


def joint(futures: Sequence[Future[Any]]) -> Future[Any]:
    """Return a new future that is waited for in the same way as ``futures`` (at least one)."""
    # A thread that waits for a remote call lets another one run.
    remote = next((future for future in futures if type(future) is not Future), futures[0])
    return remote._follower()


def after(count: int, then: Callable[[], object]) -> Callable[[object], None]:
    """Return a thread-safe function that calls ``then()`` at its ``count``-th call."""
    numbers = itertools.count(1)

    def note(_: object) -> None:
        if next(numbers) == count:
            then()

    return note
