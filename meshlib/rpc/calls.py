"""Calls under way: their futures, and the clock that ends them at their deadlines."""

from __future__ import annotations

import math
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from meshlib.calls.future import Future, after
from meshlib.calls.lane import Continuations
from meshlib.job.current import current_world
from meshlib.recording.recorder import Record
from meshlib.rpc.errors import describe, safely
from meshlib.rpc.wire.bell import Bell
from meshlib.rpc.wire.connection import Connection
from meshlib.rpc.wire.threads import Threads
from transport.deadline import Deadline, Timeout, to_seconds

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent
    from meshlib.rpc.references.ownership import ObjectId

UNSET_TIMEOUT = -1.0
"""What c10d's programs pass for the default."""


class Callbacks(Continuations):
    """Where callbacks of remote calls run: as jobs of the worker's threads, so they may wait."""

    def __init__(self, threads: Threads) -> None:
        super().__init__("rpc-callbacks")
        self._threads = threads

    def submit(self, task: Callable[[], None]) -> None:
        """Have a thread run ``task``."""
        self._threads.submit(task)

    def is_current(self) -> bool:
        """Whether callbacks run at once: never, the thread may have to read replies."""
        return False

    def is_idle(self) -> bool:
        """Whether a callback of a future that is done runs at once: it does."""
        return True


class RpcFuture(Future[Any]):
    """The outcome of a remote call, or of what follows it. ``torch.futures.Future``'s methods.

    A function that runs for a remote call, or a callback, that waits for one of these gives up its
    thread's slot.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(None, agent.callbacks)
        self._agent = agent
        self.object: tuple[int, int] | None = None
        """The object whose value it is: the number of the call that makes it."""

    def block(self, timeout: Timeout | None, what: Callable[[], str]) -> None:
        """Wait for the outcome without looking at it; ``what()`` names it in the error."""
        if self._done:
            return
        with self._agent.waiting(self):
            super().block(timeout, what)

    def _follower(self) -> Future[Any]:
        return RpcFuture(self._agent)


class Outgoing(RpcFuture):
    """A call to another worker, or to this one: its number, function, callee and deadline."""

    def __init__(
        self,
        agent: Agent,
        number: int,
        to: int,
        func: object,
        seconds: float,
        kept: object,
        what: str = "",
    ) -> None:
        super().__init__(agent)
        self.number = number
        self.to = to
        self._func = func
        self.what: str = what or name_of(func)
        """The function's name, for messages."""
        self.record: Record | None = None
        self.seconds = seconds
        self.begun: float = time.monotonic()
        self.due: float = self.begun + seconds if seconds else math.inf
        self.connection: Connection | None = None
        self.kept: object = kept
        """What must live until the reply is there."""
        self.sent: dict[str, Any] | None = None
        """What it took along, by carrier."""
        self.passed: list[tuple[int, ObjectId]] = []
        """The references in its arguments: their owners and objects."""
        self.late = False
        """Whether its deadline has passed, and the callee is asked what it does."""

    @property
    def is_question(self) -> bool:
        """Whether the worker itself was asked, not a function called."""
        return isinstance(self._func, str)

    def block(self, timeout: Timeout | None, what: Callable[[], str]) -> None:
        """Wait for the reply; read it here if no other thread reads from that worker."""
        if self._done:
            return
        if self._agent.threads.in_a_job:
            with self._agent.waiting(self):
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
            Future.block(self, timeout, what)

    def end(self, value: Any, error: BaseException | None) -> None:
        """Make this the outcome, unless there is one."""
        self.kept = None
        if self.record is not None and not self.record.ended:
            self.record.end(None if error is None else describe(error))
        settle(self, value, error)


def settle(future: Future[Any], value: Any, error: BaseException | None) -> None:
    """Make this the outcome of ``future``, unless there is one."""
    with suppress(RuntimeError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def seconds_of(timeout: Timeout | None) -> float | None:
    """Return the seconds that a call is given; None, the worker's default, also for -1 (c10d's
    ``UNSET_RPC_TIMEOUT``).

    Raises ValueError and TypeError as ``to_seconds``.
    """
    return None if timeout is None or timeout == UNSET_TIMEOUT else to_seconds(timeout)


def name_of(func: object) -> str:
    """Return what messages call a function."""

    def ask() -> str:
        name = getattr(func, "__qualname__", None)
        return f"{getattr(func, '__module__', '?')}.{name}" if name else repr(func)

    return safely(ask, "") or safely(lambda: type(func).__name__, "a function without a name")


class Request(NamedTuple):
    """What a call asks for, but its arguments: the same from whichever worker's thread."""

    to: int
    func: Callable[..., Any]
    timeout: float | None
    kept: object
    """What must live as long as it may be called."""
    what: str
    """The function's name in messages, where it is another."""

    @property
    def name(self) -> str:
        """The function's name, in messages."""
        return self.what or name_of(self.func)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, from the worker of the calling thread; return its future."""
        call: Any = getattr(current_world().rpc, "call", None)
        if call is None:
            raise RuntimeError("RPC is not initialised; call rpc.init_rpc() first")
        return call(self.to, self.func, args, kwargs, self.timeout, kept=self.kept, what=self.what)


class Clock:
    """A thread that wakes for deadlines, and for what other threads must not do themselves.

    ``work()`` is called each time; it returns when (monotonic seconds) there is something to do,
    as far as it finds that: what is due has been put where it looks before ``due`` is called.
    """

    def __init__(self, name: str, work: Callable[[], float]) -> None:
        self._work = work
        self._due = math.inf
        self._lock = threading.Lock()
        self._asked = self._closed = False
        self._bell: Bell | None = Bell()
        self._thread = threading.Thread(target=self._run, name=f"meshlib-rpc-{name}", daemon=True)
        self._thread.start()

    def due(self, moment: float) -> None:
        """Have ``work`` called at ``moment`` at the latest."""
        if moment < self._due:
            with self._lock:
                self._due = min(self._due, moment)
            self._wake()

    def ring(self) -> None:
        """Have ``work`` called. Takes no lock: for ``__del__`` as well."""
        self._asked = True
        self._wake()

    def _wake(self) -> None:
        bell = self._bell
        if bell is not None:
            bell.ring()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
            self._bell = None

    def _run(self) -> None:
        bell = self._bell
        assert bell is not None
        poll = select.poll()
        poll.register(bell.fd, select.POLLIN)
        while not self._closed:
            left = self._due - time.monotonic()
            poll.poll(min(max(left, 0.0), 3600.0) * 1000)
            bell.answer()
            asked, self._asked = self._asked, False
            if self._closed:
                return
            if not asked and time.monotonic() < self._due:
                continue
            self._due = math.inf
            moment = self._work()
            with self._lock:
                self._due = min(self._due, moment)


def wait_all(futures: Sequence[Future[Any]]) -> list[Any]:
    """Wait for all ``futures`` and return their values, in this order.

    Raises what the first raises that fails, without waiting for the others; TypeError for what is
    no future.
    """
    _check(futures)
    if not futures:
        return []
    end = _future_of(futures)
    count = after(len(futures), lambda: settle(end, None, None))

    def note(done: Future[Any]) -> None:
        if done.failure is not None:
            settle(end, done, None)
        count(done)

    for future in futures:
        future.at_once(note)
    failed: Future[Any] | None = end.wait()
    if failed is not None:
        failed.wait()
    return [future.wait() for future in futures]


def collect_all(futures: Sequence[Future[Any]]) -> Future[Any]:
    """Return a future of the list ``futures``, done when all of them are, well or not.

    Raises TypeError for what is no future.
    """
    _check(futures)
    whole = _future_of(futures)
    if not futures:
        whole.set_result([])
    note = after(len(futures), lambda: whole.set_result(list(futures)))
    for future in futures:
        future.add_done_callback(note)
    return whole


def _future_of(futures: Sequence[Future[Any]]) -> Future[Any]:
    """Return the future of what comes of all ``futures``: as those of calls, if one of them is."""
    ours = next((future for future in futures if isinstance(future, RpcFuture)), None)
    return Future[Any]() if ours is None else RpcFuture(ours._agent)  # pyright: ignore[reportPrivateUsage]


def _check(futures: Sequence[object]) -> None:
    for i, future in enumerate(futures):
        if not isinstance(future, Future):
            raise TypeError(f"futures[{i}] must be a Future, got {future!r}")
