"""``Work``: a call that was issued with ``async_op=True``; ``Future``: its value to be."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from transport.cuda.flat import Completion
from transport.deadline import Deadline, to_seconds
from transport.errors import DistBackendError, DistError


class WorkResult(enum.IntEnum):
    """How a call ended, as ``Work.get_future_result`` tells it: c10d's numbers."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    UNKNOWN = 100


class WaitTimeoutError(DistBackendError, TimeoutError):
    """``wait(timeout)`` ended before the call did. The call goes on; its group is not broken."""


class Future:
    """The outcome of a call: a value or an exception, once. Methods as ``torch.futures.Future``."""

    def __init__(self, told: Callable[[], object] | None = None) -> None:
        """Make one without an outcome; ``told()`` is called when somebody sees an exception."""
        self._told = told
        self._ready = threading.Condition()
        self._done = False
        self._value: Any = None
        self._exception: BaseException | None = None
        self._callbacks: list[Callable[[Future], object]] = []
        self._completion: Completion | None = None

    def done(self) -> bool:
        """Whether the outcome is there; on a device, whether its work is done."""
        return self._done and (self._completion is None or self._completion.done())

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Wait for the outcome (at most ``timeout`` seconds); return it or raise it.

        Raises ``WaitTimeoutError`` when the time is over first.
        """
        self.block(timeout, lambda: "the future")
        exception = self.exception()
        if exception is not None:
            raise exception
        return self._value

    def block(self, timeout: float | timedelta | None, what: Callable[[], str]) -> None:
        """Wait for the outcome without looking at it; ``what()`` names it in the error.

        An outcome on a device is waited for by the caller's current stream, not by the host,
        unless there is a ``timeout`` (seconds or a timedelta), past which it raises
        ``WaitTimeoutError``.
        """
        if self._done and self._completion is None:
            return
        deadline = None if timeout is None else Deadline.after(timeout)
        with self._ready:
            while not self._done:
                # Without a timeout the wait still ends: the call that fills this has a deadline.
                if deadline is not None and deadline.expired:
                    raise WaitTimeoutError(f"{what()} is not done after {deadline.seconds:g} s")
                self._ready.wait(None if deadline is None else deadline.remaining())
        if self._completion is not None:
            if deadline is not None and not self._completion.wait(deadline):
                raise WaitTimeoutError(f"{what()} is not done after {deadline.seconds:g} s")
            self._completion.join()

    def value(self) -> Any:
        """Return the value, or raise the exception, of a future that is done.

        Raises RuntimeError when it is not.
        """
        if not self._done:
            raise RuntimeError("the future is not done; wait() for it first")
        return self.wait()

    def exception(self) -> BaseException | None:
        """Return the exception that the call ended with, or None (also while it runs)."""
        if self._exception is not None and self._told is not None:
            self._told()
        return self._exception

    def set_result(self, result: Any, completion: Completion | None = None) -> None:
        """Make ``result`` the value. Raises RuntimeError when there is an outcome already.

        ``completion`` is the end of what a device still has to do for it.
        """
        self._settle(result, None, completion)

    def set_exception(self, exception: BaseException) -> None:
        """Make ``exception`` the outcome.

        Raises RuntimeError when there is one already, TypeError for what cannot be raised.
        """
        if not isinstance(exception, BaseException):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"exception must be an exception, got {exception!r}")
        self._settle(None, exception)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future for ``callback(self)``, called once this one is done.

        The callback runs in the thread that finishes the call (at once if it is done): it must
        not wait for a later call of the same group. Raises TypeError if it cannot be called.
        """
        check_callable(callback)
        after = Future()

        def run(done: Future) -> None:
            try:
                result = callback(done)
            except Exception as error:  # noqa: BLE001 (it becomes the outcome)
                after.set_exception(error)
            else:
                after.set_result(result)

        self.add_done_callback(run)
        return after

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call ``callback(self)`` once this future is done; its result is not used.

        Raises TypeError if it cannot be called.
        """
        check_callable(callback)
        with self._ready:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _settle(
        self, value: Any, exception: BaseException | None, completion: Completion | None = None
    ) -> None:
        with self._ready:
            if self._done:
                raise RuntimeError("the future has an outcome already")
            self._value, self._exception = value, exception
            self._completion = completion
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._ready.notify_all()
        for callback in callbacks:
            callback(self)


def check_callable(callback: object) -> None:
    """Raise TypeError unless ``callback`` can be called."""
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {callback!r}")


class Message(NamedTuple):
    """What a receive ends with: its result, and the global rank that sent it."""

    result: Any
    source: int


class Work:
    """A collective or point-to-point call under way; ``describe()`` says which."""

    def __init__(
        self, describe: Callable[[], str], told: Callable[[], object] | None = None
    ) -> None:
        self._describe = describe
        self._future = Future(told)
        self._outcome: Any = None

    def is_completed(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the call failed with, or None."""
        return self._future.exception()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Wait until the call has ended; return True or raise its exception.

        ``timeout`` (seconds or a timedelta) bounds this wait, not the call (which has a deadline
        of its own): past it, ``WaitTimeoutError``, and the call goes on. None and 0 mean no bound,
        as in c10d.
        """
        bound = None if timeout is None or to_seconds(timeout) == 0 else timeout
        self._future.block(bound, self._describe)
        exception = self._future.exception()
        if exception is not None:
            raise exception
        return True

    def synchronize(self) -> None:
        """Make the result usable by the caller: the same as ``wait()``."""
        self.wait()

    def result(self) -> Any:
        """Return what the synchronous call would have returned. Waits for the end."""
        return self._future.wait()

    def source_rank(self) -> int:
        """Return the global rank that a receive's message came from (waits for it).

        Raises ValueError for a call that is not a receive.
        """
        outcome = self.outcome()
        if not isinstance(outcome, Message):
            raise ValueError(f"source_rank() of {self._describe()}: only a receive has a source")
        return outcome.source

    def get_future(self) -> Future:
        """Return the future of the result."""
        return self._future

    def get_future_result(self) -> Future:
        """Return a future of how the call ends, a ``WorkResult``; it never holds an exception."""
        return self._future.then(_how_it_ended)

    def outcome(self) -> Any:
        """Wait for the end and return all of it: a ``Message`` for a receive."""
        self.wait()
        return self._outcome

    def finish(self, outcome: Any, completion: Completion | None = None) -> None:
        """Record a good end: what the call gave, and the end of what a device still does for it.

        For the group that runs the call.
        """
        self._outcome = outcome
        result = outcome.result if isinstance(outcome, Message) else outcome
        self._future.set_result(result, completion)

    def fail(self, exception: BaseException) -> None:
        """Record a bad end. For the group that runs the call."""
        self._future.set_exception(exception)

    def __repr__(self) -> str:
        if not self.is_completed():
            state = "under way"
        else:
            state = "done" if self.is_success() else f"failed: {self.exception()!r}"
        return f"<Work {self._describe()}: {state}>"


def _how_it_ended(future: Future) -> WorkResult:
    error = future.exception()
    if error is None:
        return WorkResult.SUCCESS
    if isinstance(error, TimeoutError):
        return WorkResult.TIMEOUT
    return WorkResult.COMM_ERROR if isinstance(error, DistError) else WorkResult.UNKNOWN
