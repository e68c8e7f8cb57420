"""The calls that one worker makes: requests, replies, and calls of broken connections."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from meshlib._arrays.pickling import Payload, load
from meshlib.rpc._calling.execution import Execution
from meshlib.rpc._calling.frames import CREATES, UNREAD, FrameKind
from meshlib.rpc._calling.futures import OutgoingCall, PreparedCall
from meshlib.rpc._calling.loopback import AnyConnection, Loopback
from meshlib.rpc._calling.recording import CallRecorder
from meshlib.rpc._carriers import Carriers
from meshlib.rpc._errors import (
    RpcConnectionError,
    RpcTimeoutError,
    answerable,
    describe,
    with_cause,
)
from meshlib.rpc._membership.directory import WorkerDirectory
from meshlib.rpc._overdue.deadlines import Deadlines
from meshlib.rpc._references.references import References
from transport._channel.channel import GREETING_SECONDS, Channel
from transport._channel.frames import ChannelFrame
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
)
from transport._waiting.deadline import Deadline

LOSS_SECONDS = 0.6
"""After a broken connection, the longest wait for a report of the worker's loss."""


class Caller:
    """The calling side of one worker. Thread-safe.

    ``timeout`` is the default timeout of a call in seconds (0: none). ``connect_timeout`` bounds
    the connection of a call without a timeout.
    """

    def __init__(
        self,
        directory: WorkerDirectory,
        channel: Channel,
        loopback: Loopback,
        execution: Execution,
        references: References,
        carriers: Carriers,
        recorder: CallRecorder,
        deadlines: Deadlines,
        timeout: float,
        connect_timeout: float,
    ) -> None:
        self.timeout = timeout
        self.closed = False
        self.next_number: Callable[[], int] = itertools.count(1).__next__
        self.last_number: int = 0
        """The number of the last call."""
        self._directory = directory
        self._channel = channel
        self._loopback = loopback
        self._execution = execution
        self._references = references
        self._carriers = carriers
        self._recorder = recorder
        self._deadlines = deadlines
        self._connect_timeout = connect_timeout
        self._moving = threading.Lock()
        self.orphans: list[dict[int, OutgoingCall]] = [{} for _ in range(directory.size)]
        """The calls of broken connections by worker, until it is known whether the worker lives."""

    # ------------------------------------------------------------------ requests

    def call(
        self,
        to: int,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None = None,
        *,
        kept: object = None,
        number: int = 0,
        what: str = "",
    ) -> OutgoingCall:
        """Send a request and return its future; ``kept`` is kept alive until the reply. With a
        ``number`` from ``next_number()``, the result remains on the callee as the object
        ``(rank, number)``. ``what`` is the function's name in messages.

        Raises pickling errors of the arguments, ``WorkerLostError`` and ``DistNetworkError``.
        """
        if self.closed:
            raise DistBackendError("RPC was shut down on this worker")
        gradients = self._carriers.gradients
        if gradients is not None:
            again = PreparedCall(to, func, timeout, kept, what)
            replaced = gradients.replace(again, args, kwargs, bool(number))
            if replaced is not None:
                return replaced
        seconds = self.timeout if timeout is None else timeout
        call = OutgoingCall(
            self._execution, number or self.next_number(), to, func, seconds, kept, what
        )
        self.last_number = call.number
        sent = self._carriers.send(to) if self._carriers else None
        served = self._execution.current
        parent = None if served is None else served.id
        payload = self._references.dump((func, args, kwargs, sent, parent), to, call.passed)
        call.record = self._recorder.made(
            call.number, to, call.what, payload.nbytes, seconds, parent
        )
        call.sent = sent
        try:
            self._send(call, payload, CREATES if number else 0)
        except BaseException as error:  # including an interrupted wait
            call.record.end(describe(error))
            self._references.lose(to, [call])
            raise
        return call

    def _send(self, call: OutgoingCall, payload: Payload, flags: int) -> None:
        again = False
        while True:
            try:
                connection = self.connect(call.to, call.seconds, call.what)
            except RpcTimeoutError as error:
                self._deadlines.request_record()
                self._references.lose(call.to, [call])
                call.end(None, error)
                return
            call.connection = connection
            connection.pending[call.number] = call
            self._deadlines.watch(call.due)
            try:
                connection.send(FrameKind.REQUEST, call.number, *payload, flags)
            except OSError:
                # The peer has not received the whole request, so it did not run the function.
                if not self._take_back(connection, call, last=again):
                    return
                again = True
                continue
            break
        if connection.is_choked:
            left = None if not call.seconds else max(call.due - time.monotonic(), 0.0)
            connection.wait_for_room(left)

    def connect(self, to: int, seconds: float, what: str = "a call") -> AnyConnection:
        """Return the connection for calls to worker ``to``, opened if there is none.

        0 ``seconds`` stand for the job's timeout. Raises ``WorkerLostError`` for a lost worker,
        ``DistNetworkError`` for an unreachable one, ``RpcTimeoutError`` after ``seconds``.
        """
        if to == self._directory.rank:
            return self._loopback
        connection = self._channel.connected(to)
        if connection is not None and connection.error is None:
            return connection
        deadline = Deadline.after(seconds or self._connect_timeout)
        if to in self._directory.lost:
            raise self._directory.lost_error(to)
        try:
            return self._channel.connect(to, deadline)
        except (CommunicatorAbortedError, CommunicatorTimeoutError, DistNetworkError) as error:
            if to in self._directory.lost:
                raise self._directory.lost_error(to) from error
            if not isinstance(error, CommunicatorTimeoutError):
                raise
            who = self._directory.describe(to)
            text = f"{what} on {who} passed its deadline of {deadline.seconds:g} s: {error}"
            raise RpcTimeoutError(text) from error

    def query(self, to: int, *question: Any, seconds: float) -> OutgoingCall:
        """Query the worker ``to`` over the existing connection; 0 ``seconds``: no timeout."""
        call = OutgoingCall(self._execution, self.next_number(), to, question[0], seconds)
        own = to == self._directory.rank
        connection = self._loopback if own else self._channel.connected(to)
        if connection is None:
            call.end(None, DistBackendError("there is no connection"))
            return call
        connection.pending[call.number] = call
        self._deadlines.watch(call.due)
        try:
            connection.send(FrameKind.QUERY, call.number, *self._references.dump(question, None))
            connection.poll()
        except OSError as error:
            connection.pending.pop(call.number, None)
            call.end(None, error)
        return call

    def abandon(self, call: OutgoingCall, error: Exception) -> None:
        """End a call with ``error``, and cancel it on the callee."""
        connection = call.connection
        if connection is not None:
            connection.pending.pop(call.number, None)
            with suppress(OSError):
                connection.send(FrameKind.CANCEL, call.number)
        call.end(None, error)

    def pending(self) -> list[OutgoingCall]:
        """Return the calls that have not ended."""
        found: list[OutgoingCall] = []
        for connection in (self._loopback, *self._channel.connections()):
            found += list(connection.pending.values())
        for orphans in self.orphans:
            found += list(orphans.values())
        return found

    # ------------------------------------------------------------------ replies

    def on_reply(self, connection: AnyConnection, frame: ChannelFrame) -> None:
        """End the call to which ``frame`` replies."""
        connection.reclaim(frame.number)
        call: OutgoingCall | None = connection.pending.pop(frame.number, None)
        buffers: Sequence[memoryview] = ()
        if frame.buffers:
            try:
                buffers = connection.fetch(frame)
            except OSError:
                if call is not None:  # it ends like all pending calls of this connection
                    connection.pending[frame.number] = call
                raise
            connection.acknowledge(frame)
        value, error = None, None
        if frame.flags & UNREAD and call is not None:
            self._references.lose(call.to, [call])
        try:
            # A reply to an ended call is unpickled too, to release its references.
            value, more = load(frame.data, buffers)
            if frame.kind == FrameKind.ERROR:
                error = with_cause(answerable(value), more)
            elif more is not None and call is not None:
                self._carriers.receive(call.sent or {}, more, call.to)
        except BaseException as problem:  # noqa: BLE001 (unpickling runs users' code)
            error = answerable(problem)
        if call is not None:
            call.end(value, error)

    # ------------------------------------------------------------------ ends

    def on_end(self, connection: AnyConnection, error: Exception) -> None:
        """Determine whether the worker of a broken connection is lost, and end its calls."""
        rank = connection.peer
        with self._moving:
            orphan(connection.pending, self.orphans[rank])
        if rank in self._directory.lost:
            self._end_orphans(rank, None)
        elif self.orphans[rank] and not self.closed:
            self._execution.threads.submit(lambda: self._inquire(rank, error))

    def lose(self, rank: int) -> None:
        """End the calls to a lost worker."""
        connection = self._channel.connected(rank)
        if connection is not None:
            with self._moving:
                orphan(connection.pending, self.orphans[rank])
        self._end_orphans(rank, None)

    def _inquire(self, rank: int, error: Exception) -> None:
        """Determine whether a worker is lost, and end the calls of its broken connection."""
        with self._execution.threads.slot_released():
            self._directory.await_loss(rank, LOSS_SECONDS)
        with suppress(DistError):
            self.connect(rank, GREETING_SECONDS)
        self._end_orphans(rank, error)

    def _end_orphans(self, rank: int, error: Exception | None) -> None:
        with self._moving:
            orphans, self.orphans[rank] = self.orphans[rank], {}
        lost = rank in self._directory.lost
        if not lost:
            self._references.lose(rank, orphans.values())
        for call in orphans.values():
            if lost:
                call.end(None, self._directory.lost_error(rank, call.what, call.begun))
            else:
                text = (
                    f"the connection to {self._directory.describe(rank)} broke ({error}) during"
                    f" the call of {call.what}, which may or may not have run"
                )
                call.end(None, RpcConnectionError(text))

    def _take_back(self, connection: AnyConnection, call: OutgoingCall, *, last: bool) -> bool:
        """Return whether a call that could not be sent may be sent again. If not, it has ended,
        with its connection or because this was the ``last`` attempt.
        """
        with self._moving:
            found = connection.pending.pop(call.number, None)
            found = found or self.orphans[call.to].pop(call.number, None)
        if found is not None and last:
            self._references.lose(call.to, [call])
            who = self._directory.describe(call.to)
            text = f"{call.what} could not be sent to {who}: two connections to it broke"
            call.end(None, RpcConnectionError(text))
        return found is not None and not last


def orphan(pending: dict[int, OutgoingCall], orphans: dict[int, OutgoingCall]) -> None:
    """Move all calls of a connection that has ended to ``orphans``."""
    # One by one, because another thread may add a call meanwhile and must find it in one of them.
    for number in list(pending):
        call = pending.pop(number, None)
        if call is not None:
            orphans[number] = call
