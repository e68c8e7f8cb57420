"""Serving the calls of other workers."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from meshlib._arrays.pickling import Payload, load
from meshlib._calls.future import Future
from meshlib._recording.stacks import frames_of
from meshlib.rpc._calling.execution import CallId, Execution, ServedCall
from meshlib.rpc._calling.frames import CREATES, UNREAD, FrameKind
from meshlib.rpc._calling.futures import name_of, settle
from meshlib.rpc._calling.loopback import AnyConnection
from meshlib.rpc._calling.recording import CallRecorder
from meshlib.rpc._carriers import Carriers
from meshlib.rpc._errors import (
    RemoteError,
    answerable,
    describe,
    safely,
    with_cause,
    without_frames,
)
from meshlib.rpc._membership.directory import WorkerDirectory
from meshlib.rpc._references.references import References
from meshlib.rpc.functions import future_of, is_async
from transport._channel.frames import ChannelFrame


class CallServer:
    """A server of one worker's calls, which run as jobs of ``execution``.

    While ``has_left()`` is true, failed calls get no reply: they fail because this worker ends.
    """

    def __init__(
        self,
        directory: WorkerDirectory,
        execution: Execution,
        references: References,
        carriers: Carriers,
        recorder: CallRecorder,
        has_left: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._execution = execution
        self._references = references
        self._carriers = carriers
        self._recorder = recorder
        self._has_left = has_left

    def accept(self, connection: AnyConnection, frame: ChannelFrame) -> None:
        """Run a request in a thread of the pool, perhaps in the calling thread."""
        caller, lost = connection.peer, self._directory.lost
        call = ServedCall((caller, frame.number), connection, frame.nbytes, time.monotonic())
        self._execution.calls[call.id] = call
        if caller in lost:  # the loss was handled before this call was added
            call.cancelled = f"its caller, {self._directory.describe(caller)}, {lost[caller]}"
        if frame.flags & CREATES:
            # Created before any other worker's reference to it arrives.
            call.result = self._references.create(call.id)
        self._execution.threads.add(lambda: self._run(call, frame), call.nbytes)

    def state_of(self, call_id: CallId) -> str:
        """Describe the current activity of a call, for its caller's error."""
        call = self._execution.calls.get(call_id)
        if call is None:
            return "it has ended there or has not arrived"
        if call.thread is None:
            threads = self._execution.threads
            if threads.running < threads.limit:
                return "it has arrived and is about to begin"
            return (
                f"it has not begun: all {threads.limit} threads are busy, and"
                f" {threads.backlog} calls wait"
            )
        seconds = time.monotonic() - call.begun
        if call.thread == 0:
            return f"it has waited for {seconds:.1f} s for the future that the function returned"
        return f"it has run for {seconds:.1f} s, {_stack_below(call.thread)}"

    # ------------------------------------------------------------------ one call

    def _run(self, call: ServedCall, frame: ChannelFrame) -> None:
        here = self._execution.here
        before, here.call = here.call, call
        call.begun, call.thread = time.monotonic(), threading.get_ident()
        try:
            self._run_function(call, frame)
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self._fail(call, error)
        finally:
            here.call = before

    def _run_function(self, call: ServedCall, frame: ChannelFrame) -> None:
        buffers = call.connection.fetch(frame)
        loaded = self._references.load(*call.id, frame.data, buffers)
        func, args, kwargs, sent, parent = loaded
        del loaded
        del frame, buffers
        call.func, call.parent, call.sent = func, parent, sent
        if call.cancelled is not None:
            raise RemoteError(f"the call was cancelled before it began: {call.cancelled}")
        self._directory.await_names()
        if sent is None:
            result, backs = func(*args, **kwargs), None
        else:
            with contextlib.ExitStack() as stack:
                backs = self._carriers.serve(sent, call.id[0], stack)
                result = func(*args, **kwargs)
        del args, kwargs
        if isinstance(result, Later):
            result = result.future
            call.waits_for, call.waits_since = result, time.monotonic()
        elif is_async(func):
            result = future_of(func, result)
        else:
            self._answer(call, result, backs)
            return
        call.thread = 0
        result.add_done_callback(lambda done: self._answer_later(call, done, backs))

    def _answer_later(
        self, call: ServedCall, done: Future[Any], backs: dict[str, Any] | None
    ) -> None:
        here = self._execution.here
        before, here.call = here.call, None
        try:
            error = done.exception()
            if error is not None:
                self._fail(call, error)
            else:
                self._answer(call, done.value(), backs)
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self._fail(call, error)
        finally:
            here.call = before

    def _answer(self, call: ServedCall, result: Any, backs: dict[str, Any] | None) -> None:
        if call.result is not None:
            settle(call.result, result, None)
            result = None
        brought = {name: it for name, back in (backs or {}).items() if (it := back()) is not None}
        with self._carriers.answering(call.sent):
            payload = self._references.dump((result, brought or None), call.id[0])
        self._send(call, FrameKind.REPLY, payload, None)

    def _fail(self, call: ServedCall, error: BaseException) -> None:
        was_read = call.func is not None
        name = name_of(call.func) if was_read else "a call"
        lines = safely(lambda: "".join(traceback.format_exception(error)), describe(error))
        who = self._directory.describe(self._directory.rank)
        text = f"On {who}, in {name}:\n{lines}"
        error = answerable(error)
        if call.result is not None:
            settle(call.result, None, with_cause(without_frames(error), text))
        payload = safely(lambda: self._packed(error, text, call.id[0]), None)
        if payload is None:
            stand_in = RemoteError(describe(error))
            payload = self._references.dump((stand_in, text), call.id[0])
        flags = 0 if was_read else UNREAD
        self._send(call, FrameKind.ERROR, payload, describe(error), flags)

    def _packed(self, error: Exception, text: str, to: int) -> Payload | None:
        """Return the payload of ``error`` for the worker ``to``; None if it cannot be unpickled."""
        dump = self._references.dump
        # The trial is pickled for this worker, which also receives its references.
        trial = dump((error, text), self._directory.rank)
        loaded, _ = load(trial.data, trial.buffers)
        return dump((error, text), to) if isinstance(loaded, Exception) else None

    def _send(
        self, call: ServedCall, kind: int, payload: Payload, error: str | None, flags: int = 0
    ) -> None:
        self._execution.calls.pop(call.id, None)
        self._recorder.served(call, error or call.cancelled)
        call.result = None
        if kind == FrameKind.ERROR and self._has_left():
            return
        with suppress(OSError):  # the caller's calls have failed with the connection
            call.connection.send(kind, call.id[1], *payload, flags)


class Later(NamedTuple):
    """The result of an internal function whose reply is the value of ``future``."""

    future: Future[Any]


def _stack_below(thread: int) -> str:
    """Return the stack of the function that a thread runs for a call, as text."""
    frames = frames_of(thread)
    ours = [i for i, (frame, _) in enumerate(frames) if frame.f_code is _RUN]
    below = frames[ours[-1] + 1 :] if ours else []
    # The module's loader, which provides the source lines, may be the user's and raise.
    text = safely(lambda: "".join(traceback.StackSummary.extract(iter(below)).format()), "")
    text = text.rstrip()
    return f"and is at\n{text}" if text else "inside a function that is not written in Python"


_RUN = CallServer._run_function.__code__  # pyright: ignore[reportPrivateUsage]
