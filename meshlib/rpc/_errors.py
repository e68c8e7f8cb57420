"""Errors of remote calls, other than the function's own."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import TypeVar

from transport._errors import DistBackendError, DistNetworkError

T = TypeVar("T")


class RpcTimeoutError(DistBackendError, TimeoutError):
    """A call passed its deadline; the message has the callee's activity at that time."""


class WorkerLostError(DistBackendError):
    """The worker that a call needs is gone; the message says how it ended, and during which call.

    ``rank`` is its rank, ``worker`` its name.
    """

    def __init__(self, message: str, rank: int = -1, worker: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker = worker

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, int, str]]:
        return WorkerLostError, (str(self), self.rank, self.worker)


class RpcConnectionError(DistNetworkError):
    """The connection that a call was under way on broke, and the worker lives: the function may
    have run there or not. The next call makes another connection.
    """


class RRefLostError(DistBackendError):
    """The object that an RRef refers to is gone, or was never made; the message says why."""


class WaitCycleError(DistBackendError):
    """Calls wait for each other in a circle, and would for ever; the message has a row for each."""


class RemoteError(DistBackendError):
    """Stands for an exception that could not travel, or that must not end another process."""


class RemoteTraceback(Exception):
    """The traceback of an exception where it was raised: that one's ``__cause__``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of ``error`` to keep, or to raise in place of one that is kept.

    The traceback of an exception refers to every frame that it passed, and to all their objects. If
    an object holds the exception, and such a frame a reference to the object, neither is ever
    freed. An exception without a copy is returned itself.
    """
    made = safely(lambda: copy.copy(error), error)
    if type(made) is not type(error):
        return error
    return _caused_by(made, error.__cause__)


def with_cause(error: BaseException, text: str) -> BaseException:
    """Return ``error`` with the traceback ``text`` of where it was raised as its cause."""
    return _caused_by(error, RemoteTraceback(text))


def _caused_by(error: BaseException, cause: BaseException | None) -> BaseException:
    BaseException.__setattr__(error, "__cause__", cause)  # its class may have a method of its own
    return error


def safely(make: Callable[[], T], otherwise: T) -> T:
    """Return ``make()``, or ``otherwise`` where that raises anything.

    For threads that serve others, where they run code of a user's class (``__str__``,
    ``__reduce__``): no exception of it may end the thread. Raises KeyboardInterrupt in the main
    thread, where a signal causes it.
    """
    try:
        return make()
    except BaseException as error:  # noqa: BLE001 (SystemExit would end the thread as well)
        _raise_interrupt(error)
        return otherwise


def answerable(error: BaseException) -> Exception:
    """Return ``error``, or the ``RemoteError`` for one that must not end another process.

    Raises KeyboardInterrupt as ``safely`` does.
    """
    if isinstance(error, Exception):
        return error
    _raise_interrupt(error)
    shown = safely(lambda: repr(error), describe(error))
    return RemoteError(f"it ended with {shown}")


def describe(error: BaseException) -> str:
    """Return the type and text of ``error``, whatever its own methods do."""
    name = safely(lambda: type(error).__name__, "an exception without a name")
    return f"{name}: {safely(lambda: str(error), '(its __str__ failed)')}"


def _raise_interrupt(error: BaseException) -> None:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and isinstance(error, KeyboardInterrupt):
        raise error
