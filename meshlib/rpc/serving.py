"""Running what other workers ask for, and answering."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from meshlib.calls.future import Future
from meshlib.recording.stacks import frames_of
from meshlib.rpc.calls import name_of, settle
from meshlib.rpc.errors import (
    RemoteError,
    answerable,
    describe,
    safely,
    with_cause,
    without_frames,
)
from meshlib.rpc.functions import future_of, is_async
from meshlib.rpc.recording import Key
from meshlib.rpc.references.ownership import Owned
from meshlib.rpc.wire.connection import Connection
from meshlib.rpc.wire.frames import Frame, Kind
from meshlib.rpc.wire.payload import Payload, load

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent

CREATES = 1
"""The flag of a request whose value becomes an object of this worker."""
UNREAD = 1
"""The flag of the answer to a request that could not be unpickled."""


@dataclass(slots=True, eq=False)
class Serving:
    """A call of another worker's, or of this one's own, that runs here or waits for its turn."""

    key: Key
    connection: Connection | None
    nbytes: int
    came: float
    parent: Key | None = None
    """The call whose function made this one."""
    func: object = None
    sent: dict[str, Any] | None = None
    """What it brought along, by carrier."""
    thread: int | None = None
    begun: float = 0.0
    cancelled: str | None = None
    waits_for: Future[Any] | None = None
    """The future that its thread waits for, or that it is to answer with."""
    waits_since: float = 0.0
    kept: Owned | None = None
    """The object that its value becomes."""


class _Here(threading.local):
    """The call that the calling thread serves."""

    serving: Serving | None = None


class Server:
    """The requests of one worker's callers. Jobs of its threads run them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._here = _Here()
        self.under_way: dict[Key, Serving] = {}

    @property
    def current(self) -> Serving | None:
        """The call that the calling thread serves, if it does."""
        return self._here.serving

    @contextlib.contextmanager
    def serving(self, serving: Serving | None) -> Generator[None]:
        """Have the calling thread serve a call."""
        here, before = self._here, self._here.serving
        here.serving = serving
        try:
            yield
        finally:
            here.serving = before

    def accept(self, connection: Connection | None, caller: int, frame: Frame) -> None:
        """Have a thread run a request; the calling thread may."""
        serving = Serving((caller, frame.call), connection, frame.nbytes, time.monotonic())
        self.under_way[serving.key] = serving
        agent = self._agent
        if caller in agent.peers.lost:  # told after the request was read: then nobody looked here
            serving.cancelled = f"its caller, {agent.who(caller)}, {agent.peers.lost[caller]}"
        if frame.flags & CREATES:
            # Whoever holds references, it must not go before it was made.
            serving.kept = agent.holdings.create(serving.key)
        agent.threads.add(lambda: self._run(serving, frame), serving.nbytes)

    def has_begun_all_of(self, caller: int) -> bool:
        """Whether all requests of a worker that were read are unpickled."""
        served = [one for one in list(self.under_way.values()) if one.key[0] == caller]
        return all(serving.func is not None for serving in served)

    def has_begun(self, key: Key) -> bool:
        """Whether a request that has come is unpickled, or has ended."""
        serving = self.under_way.get(key)
        return serving is None or serving.func is not None

    def note_function(self, func: object) -> None:
        """Note that the call which the calling thread serves runs ``func``, found by its name."""
        serving = self.current
        if serving is not None:
            serving.func = func

    def cancel(self, key: Key, why: str) -> None:
        """Note that nobody waits for a call any more."""
        serving = self.under_way.get(key)
        if serving is not None:
            serving.cancelled = why

    def cancel_all(self, of: Callable[[Serving], bool], why: str) -> None:
        """Do so for those ``of`` which this is true."""
        for serving in list(self.under_way.values()):
            if of(serving):
                serving.cancelled = why

    def describe(self, key: Key) -> str:
        """Return what a call does at this moment, for the error of its caller."""
        serving = self.under_way.get(key)
        if serving is None:
            return "it has ended there, or has not arrived"
        if serving.thread is None:
            threads = self._agent.threads
            if threads.running < threads.limit:
                return "it has arrived, and is about to begin"
            return (
                f"it has not begun: all {threads.limit} threads are busy, {threads.backlog}"
                " calls wait for one"
            )
        seconds = time.monotonic() - serving.begun
        if serving.thread == 0:
            return f"it waits, for {seconds:.1f} s, for the future that the function has returned"
        return f"it has run for {seconds:.1f} s, {_stack_below(serving.thread)}"

    # ------------------------------------------------------------------ one call

    def _run(self, serving: Serving, frame: Frame) -> None:
        here, before = self._here, self._here.serving
        here.serving = serving
        serving.begun, serving.thread = time.monotonic(), threading.get_ident()
        try:
            self._run_it(serving, frame)
        except BaseException as error:  # noqa: BLE001 (it becomes the caller's)
            self._fail(serving, error)
        finally:
            here.serving = before

    def _run_it(self, serving: Serving, frame: Frame) -> None:
        agent, connection = self._agent, serving.connection
        if connection is None:
            buffers = [buffer.memory for buffer in frame.buffers if buffer.memory is not None]
        else:
            buffers = connection.fetch(frame)
        loaded = agent.holdings.load(*serving.key, frame.data, buffers)
        func, args, kwargs, sent, parent = loaded
        del loaded
        del frame, buffers
        serving.func, serving.parent, serving.sent = func, parent, sent
        if serving.cancelled is not None:
            raise RemoteError(f"the call was not begun: {serving.cancelled}")
        if not agent.workers:
            agent.find(agent.rank)  # who calls may have met all workers before this one has
        if sent is None:
            result, backs = func(*args, **kwargs), None
        else:
            with contextlib.ExitStack() as stack:
                backs = agent.carriers.serve(sent, serving.key[0], stack)
                result = func(*args, **kwargs)
        del args, kwargs
        if isinstance(result, Later):
            result = result.future
            serving.waits_for, serving.waits_since = result, time.monotonic()
        elif is_async(func):
            result = future_of(func, result)
        else:
            self._answer(serving, result, backs)
            return
        serving.thread = 0
        result.add_done_callback(lambda done: self._answer_later(serving, done, backs))

    def _answer_later(
        self, serving: Serving, done: Future[Any], backs: dict[str, Any] | None
    ) -> None:
        with self.serving(None):
            try:
                error = done.exception()
                if error is not None:
                    self._fail(serving, error)
                else:
                    self._answer(serving, done.value(), backs)
            except BaseException as error:  # noqa: BLE001 (it becomes the caller's)
                self._fail(serving, error)

    def _answer(self, serving: Serving, result: Any, backs: dict[str, Any] | None) -> None:
        if serving.kept is not None:
            settle(serving.kept.value, result, None)
            result = None
        brought = {name: it for name, back in (backs or {}).items() if (it := back()) is not None}
        with self._agent.carriers.answering(serving.sent):
            payload = self._agent.holdings.dump((result, brought or None), serving.key[0])
        self._send(serving, Kind.REPLY, payload, None)

    def _fail(self, serving: Serving, error: BaseException) -> None:
        name = name_of(serving.func) if serving.func is not None else "a call"
        lines = safely(lambda: "".join(traceback.format_exception(error)), describe(error))
        text = f"On {self._agent.who(self._agent.rank)}, in {name}:\n{lines}"
        error = answerable(error)
        if serving.kept is not None:
            settle(serving.kept.value, None, with_cause(without_frames(error), text))
        payload = safely(lambda: self._packed(error, text, serving.key[0]), None)
        if payload is None:
            stand_in = RemoteError(describe(error))
            payload = self._agent.holdings.dump((stand_in, text), serving.key[0])
        flags = UNREAD if serving.func is None else 0
        self._send(serving, Kind.ERROR, payload, describe(error), flags)

    def _packed(self, error: Exception, text: str, to: int) -> Payload | None:
        """Return the payload of ``error`` for a worker; None: another worker cannot unpickle it."""
        dump = self._agent.holdings.dump
        # References in it are passed to this worker itself by the trial, and counted as such.
        trial = dump((error, text), self._agent.rank)
        came, _ = load(trial.data, trial.buffers)
        return dump((error, text), to) if isinstance(came, Exception) else None

    def _send(
        self, serving: Serving, kind: int, payload: Payload, error: str | None, flags: int = 0
    ) -> None:
        self.under_way.pop(serving.key, None)
        self._agent.recorder.served(serving, error or serving.cancelled)
        serving.kept = None
        number, connection = serving.key[1], serving.connection
        if kind == Kind.ERROR and self._agent.has_left:
            return  # the function failed because this worker ends: its caller hears of that
        if connection is None:
            buffers = [memoryview(bytearray(buffer)) for buffer in payload.buffers]
            self._agent.on_local_reply(Frame(kind, flags, number, payload.data, ()), buffers)
            return
        with suppress(OSError):  # the caller is gone, and has been told, or cannot be
            connection.send(kind, number, payload, flags)


class Later(NamedTuple):
    """What a function of ours returns for an answer that comes when ``future`` is done."""

    future: Future[Any]


def _stack_below(thread: int) -> str:
    """Return where the function that a thread runs for a call is, as lines to print."""
    frames = frames_of(thread)
    ours = [i for i, (frame, _) in enumerate(frames) if frame.f_code is _RUN]
    below = frames[ours[-1] + 1 :] if ours else []
    # The lines of a module come from its loader, which may be the user's.
    text = safely(lambda: "".join(traceback.StackSummary.extract(iter(below)).format()), "")
    text = text.rstrip()
    return f"and is at\n{text}" if text else "inside of a function that is not written in Python"


_RUN = Server._run_it.__code__  # pyright: ignore[reportPrivateUsage]
