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
    """The worker that a call needs is lost; the message has the cause and the call.

    ``rank`` is its rank, ``worker`` its name.
    """

    def __init__(self, message: str, rank: int = -1, worker: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.worker = worker

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, int, str]]:
        return WorkerLostError, (str(self), self.rank, self.worker)


class RpcConnectionError(DistNetworkError):
    """The connection of a call broke, but the worker lives. The function may or may not have run.
    The next call opens another connection.
    """


class RRefLostError(DistBackendError):
    """The object of an RRef is lost or was never created; the message has the reason."""


class WaitCycleError(DistBackendError):
    """Calls wait for each other in a cycle, forever; the message has a row for each call."""


class RemoteError(DistBackendError):
    """A substitute for an exception that cannot be pickled, or that would end another process."""


class RemoteTraceback(Exception):
    """The remote traceback of an exception, as its ``__cause__``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def without_frames(error: BaseException) -> BaseException:
    """Return a copy of ``error`` without traceback, to store or to raise in place of a stored one.

    An exception's traceback refers to every frame that it passed, and to the frames' objects. If
    one of these objects is a reference to an object that holds the exception, neither is ever
    freed. An exception that cannot be copied is returned itself.
    """
    made = safely(lambda: copy.copy(error), error)
    if type(made) is not type(error):
        return error
    return _caused_by(made, error.__cause__)


def with_cause(error: BaseException, text: str) -> BaseException:
    """Return ``error`` with its remote traceback ``text`` as its cause."""
    return _caused_by(error, RemoteTraceback(text))


def _caused_by(error: BaseException, cause: BaseException | None) -> BaseException:
    BaseException.__setattr__(error, "__cause__", cause)  # its class may define __setattr__
    return error


def safely(make: Callable[[], T], otherwise: T) -> T:
    """Return ``make()``, or ``otherwise`` if that raises anything.

    For code of users' classes (``__str__``, ``__reduce__``), whose exceptions must not end a
    serving thread. Raises KeyboardInterrupt in the main thread, where a signal causes it.
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
    """Return the type and text of ``error``, even if its methods raise."""
    name = safely(lambda: type(error).__name__, "an exception without a name")
    return f"{name}: {safely(lambda: str(error), '(its __str__ failed)')}"


def _raise_interrupt(error: BaseException) -> None:
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and isinstance(error, KeyboardInterrupt):
        raise error
