"""The futures of remote calls."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from meshlib._calls.future import Future, after, at_once, joint
from meshlib._job.current import current_world
from meshlib._recording.recorder import Record
from meshlib.rpc._calling.execution import CallId, Execution
from meshlib.rpc._calling.loopback import AnyConnection
from meshlib.rpc._errors import describe, safely
from transport._waiting.deadline import Deadline, Timeout, to_seconds

UNSET_TIMEOUT = -1.0
"""c10d's ``UNSET_RPC_TIMEOUT``: the worker's default."""


class RpcFuture(Future[Any]):
    """The outcome of a remote call or of its continuation, with ``torch.futures.Future``'s methods.

    A remotely called function or a callback that waits for it releases its thread's slot.
    """

    def __init__(self, execution: Execution, oid: CallId | None = None) -> None:
        super().__init__(None, execution.callbacks)
        self.execution = execution
        self.object = oid
        """The id of the object of this worker that the future will hold."""

    def _block(self, timeout: Timeout | None, what: Callable[[], str]) -> None:
        if self._done:
            return
        with self.execution.waiting(self):
            super()._block(timeout, what)

    def _follower(self) -> Future[Any]:
        return RpcFuture(self.execution)


class OutgoingCall(RpcFuture):
    """A call of this worker: its number, function, callee and deadline.

    ``seconds`` is its timeout (0: none); ``kept`` is kept alive until the call ends.
    """

    def __init__(
        self,
        execution: Execution,
        number: int,
        to: int,
        func: object,
        seconds: float,
        kept: object = None,
        what: str = "",
    ) -> None:
        super().__init__(execution)
        self.number = number
        self.to = to
        self._func = func
        self.what: str = what or name_of(func)
        """The function's name, for messages."""
        self.record: Record | None = None
        self.seconds = seconds
        self.begun: float = time.monotonic()
        self.due: float = self.begun + seconds if seconds else math.inf
        self.connection: AnyConnection | None = None
        self.sent: dict[str, Any] | None = None
        """Data of the request's context carriers, by name."""
        self.passed: list[tuple[int, CallId]] = []
        """The owners and objects of the references in its arguments."""
        self.late = False
        """True if its deadline has passed, and the callee has been queried."""
        self._kept = kept

    @property
    def is_question(self) -> bool:
        """True if it queries the worker, and calls no function."""
        return isinstance(self._func, str)

    def _block(self, timeout: Timeout | None, what: Callable[[], str]) -> None:
        """Wait for the reply, reading it in this thread unless another reads the connection."""
        if self._done:
            return
        if self.execution.threads.in_a_job:
            with self.execution.waiting(self):
                self._read(timeout, what)
        else:
            self._read(timeout, what)

    def _read(self, timeout: Timeout | None, what: Callable[[], str]) -> None:
        connection = self.connection
        if connection is not None:
            if timeout is None:
                connection.read_until(lambda: self._done)
            else:
                deadline = Deadline.after(timeout)
                connection.read_until(lambda: self._done or deadline.expired)
                timeout = deadline.remaining()
        if not self._done:
            Future._block(self, timeout, what)

    def end(self, value: Any, error: BaseException | None) -> None:
        """Set the outcome, unless the call has one."""
        self._kept = None
        if self.record is not None and not self.record.ended:
            self.record.end(None if error is None else describe(error))
        settle(self, value, error)


def settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    """Set the outcome of ``future``, unless it has one."""
    with suppress(RuntimeError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def polled(call: Any) -> Any:
    """Let the reply of ``call`` be read on arrival, even if no thread waits; return ``call``."""
    if call.connection is not None:
        call.connection.poll()
    return call


def seconds_of(timeout: Timeout | None) -> float | None:
    """Return a call's timeout in seconds; None, the worker's default, for None and -1.

    Raises ValueError and TypeError as ``to_seconds`` does.
    """
    return None if timeout is None or timeout == UNSET_TIMEOUT else to_seconds(timeout)


def name_of(func: object) -> str:
    """Return the name of a function, for messages."""

    def qualified() -> str:
        name = getattr(func, "__qualname__", None)
        return f"{getattr(func, '__module__', '?')}.{name}" if name else repr(func)

    return safely(qualified, "") or safely(lambda: type(func).__name__, "a function without a name")


class PreparedCall(NamedTuple):
    """A call without arguments, which any worker can complete and make."""

    to: int
    func: Callable[..., Any]
    timeout: float | None
    kept: object
    """An object to keep alive until the call ends."""
    what: str
    """The name to show in messages in place of the function's."""

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        return self.what or name_of(self.func)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call from the calling thread's worker; return its future."""
        caller: Any = getattr(current_world().rpc, "caller", None)
        if caller is None:
            raise RuntimeError("RPC is not initialised; call rpc.init_rpc() first")
        return caller.call(
            self.to, self.func, args, kwargs, self.timeout, kept=self.kept, what=self.what
        )


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all ``futures`` and return their values, in this order.

    Raises the exception of the first future that fails, without waiting for the others. Raises
    TypeError for a value that is not a future.
    """
    _check(futures)
    if not futures:
        return []
    end = joint(futures)
    count = after(len(futures), lambda: settle(end, None, None))

    def note(done: Future[Any]) -> None:
        if done.exception() is not None:
            settle(end, done, None)
        count(done)

    for future in futures:
        at_once(future, note)
    failed: Future[Any] | None = end.wait()
    if failed is not None:
        failed.wait()
    return [future.wait() for future in futures]


def _check(futures: Sequence[object]) -> None:
    for i, future in enumerate(futures):
        if not isinstance(future, Future):
            raise TypeError(f"futures[{i}] must be a Future, got {future!r}")
