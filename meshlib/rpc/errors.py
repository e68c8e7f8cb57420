"""What a remote call fails with, other than what the function itself raises."""

from __future__ import annotations

import copy

from transport.errors import DistBackendError, DistNetworkError


class RpcTimeoutError(DistBackendError, TimeoutError):
    """A call passed its deadline; the message says what the callee was doing then."""


class WorkerLostError(DistBackendError):
    """The worker that a call needs is gone; the message says how it ended, and during what.

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

    Whoever an exception has passed through is in its traceback with all that it refers to. Where
    the exception is an object's, and one of those a reference to the object, neither ever ends.
    What has no copy is returned itself.
    """
    try:
        made = copy.copy(error)
    except Exception:  # noqa: BLE001 (whatever a class's own copying may raise)
        return error
    if type(made) is not type(error):
        return error
    made.__cause__ = error.__cause__
    return made
