"""``CallQueue``: the single entry point for all calls of a group.

``CallQueue.issue`` alone combines order, deadlines, recording, the fast path and failures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from meshlib._calls.call_stream import CallStream
from meshlib._calls.call_streams import CallStreams
from meshlib._calls.context import RankContext
from meshlib._calls.failures.failure import Failure
from meshlib._calls.fast_path import SHORT, FastPath
from meshlib._calls.members import Members
from meshlib._calls.spec import CallSpec, Overlapping, Run, Unended
from meshlib._calls.state import GroupState, Lifecycle
from meshlib._calls.work import Work, fail, finish, outcome_of
from meshlib._native import calls as native
from meshlib._recording.log import LOGGER
from meshlib._recording.recorder import COLLECTIVE, Record
from transport._calls.call import Call, CallTail
from transport._calls.codes import OP_CODES
from transport._calls.header import CallHeader, Kind
from transport._communicators.base import Communicator
from transport._errors import DistBackendError
from transport._native import core
from transport._operands.reduce_op import Flat, ReduceOp
from transport._waiting.deadline import Deadline, Timeout, to_seconds
from transport._waiting.interrupts import is_held

T = TypeVar("T")

DRAIN_SECONDS = 5.0
"""The time that a closing group waits for its calls to end."""
_OPS = (None, *(getattr(ReduceOp, name, None) for name in OP_CODES))
"""The predefined reductions, by their codes."""


class CallQueue:
    """Makes the calls of the group of ``members``.

    ``state`` records whether the group works, has failed or has ended, and ``failure`` changes it.
    The members' global ranks are ``ranks``; this rank is at index ``rank``, or -1 if it is not a
    member. A derived group's queue has the parent group's queue as its ``base``.
    """

    def __init__(
        self, context: RankContext, members: Members, base: CallQueue | None = None
    ) -> None:
        self.context: RankContext = context
        self.members: Members = members
        self.ranks: tuple[int, ...] = members.ranks
        self.rank: int = members.rank()
        self.state: GroupState = GroupState(context, members, None if base is None else base.state)
        self.failure: Failure = Failure(self.state)
        name = members.group_desc or members.id
        self.streams: CallStreams = CallStreams(name, context.rank, context.adopt_thread)
        self._derived: list[CallQueue] = []
        if base is not None:
            left = [one for one in base._derived if not one.state.destroyed]
            base._derived = [*left, self]

    def issue(self, spec: CallSpec, async_op: bool = False, timeout: Timeout | None = None) -> Any:
        """Make one call: run ``spec.run(communicator, call)`` in its turn.

        Collectives run in the order of issue. So do point-to-point calls with the same peer,
        direction and tag, independently of all others. ``timeout`` is the group's by default. An
        asynchronous send runs in the caller's thread if the receiver has room for it.

        Returns the result of ``run`` (a ``ReceivedMessage`` for a receive), or a ``Work`` if
        ``async_op``. Raises ValueError for a device without a backend and on a destroyed group. On
        a broken group, raises the error that broke it. Raises ``DistBackendError`` in a signal
        handler that has interrupted a call for which this one would have to wait.
        """
        seconds = self.members.seconds
        if timeout is not None:
            seconds = self.checked(spec.kind, to_seconds, timeout)
        state = self.state
        fast_path = state.fast_path
        if fast_path is not None and not async_op:
            result = fast_path.open(spec, seconds)
            if result is not NotImplemented:
                return result
        kind, run, device, peer = spec.kind, spec.run, spec.device, spec.peer
        context = self.context
        if device != "cpu":
            self.checked(kind, self._check_device, device)
        if context.observers and peer == COLLECTIVE:
            run = self._observed(spec)
        numbered_here = is_held(state.lock)
        with state.lock:
            self._check_usable(kind, numbered_here)
            streams = self.streams
            message = peer != COLLECTIVE
            stream = streams.of_peer(kind, peer, spec.extra) if message else streams.collectives
            if not async_op and self._is_blocked(stream):
                raise self._interrupted(kind)
            try:
                state.order.numbering = True  # the compiled core numbers no call meanwhile
                packed = state.order.next_header(spec)
                record = context.recorder.open(
                    self.members.id, packed, spec.nbytes, peer, not async_op, seconds
                )
                if context.log.detailed:
                    run = context.log.around(run, record, self.members)
                inline = (not async_op or kind is Kind.SEND) and stream.try_enter()
                # This thread holds the stream, so no other send can fill the receiver's buffer.
                if inline and async_op and not self._ends_at_once(spec):
                    stream.leave()
                    inline = False
                work = None if inline else self._enqueue(stream, run, record, spec)
            finally:
                state.order.numbering = False
        if work is not None:
            return work if async_op else outcome_of(work)
        if async_op:
            return self._at_once(stream, run, record, device)
        record.started = record.issued
        try:
            result = self._run(run, record, device)
            if device == "cpu" and (fast_path is None or not fast_path.met):
                self.open_fast_path(kind in SHORT)
        finally:
            stream.leave()
        if record.completion is not None:
            completion, record.completion = record.completion, None  # the record lives longer
            completion.join()
        return result

    def checked(self, kind: Kind, check: Callable[..., T], *arguments: Any) -> T:
        """Return ``check(*arguments)``, which checks the arguments of a call.

        If it raises, the other members are notified so that they do not wait: ``Failure.refuse``.
        """
        try:
            return check(*arguments)
        except Exception as error:
            self.failure.refuse(kind, error)
            raise

    def _check_device(self, device: str) -> None:
        backends = self.members.backends
        # The CPU backend can also send arrays on a GPU.
        if device not in backends and not (device == "cuda" and "cpu" in backends):
            has = self.members.backend
            raise ValueError(f"{self} has no backend for arrays on {device!r}; it has {has!r}")

    def _observed(self, spec: CallSpec) -> Run:
        header = CallHeader(
            0, spec.elements, spec.root, spec.kind, spec.dtype, spec.op, extra=spec.extra
        )
        run = spec.run
        for observer in list(self.context.observers.values()):
            run = observer(self.members, header, spec.device, run)
        return run

    def _ends_at_once(self, spec: CallSpec) -> bool:
        """True if a send completes without blocking and so needs no other thread."""
        communicator = self.state.communicators.get(spec.device)
        return communicator is not None and communicator.takes_at_once(spec.peer, spec.nbytes)

    def _at_once(self, stream: CallStream, run: Run, record: Record, device: str) -> Work[Any]:
        """Make an asynchronous call in this thread, which holds its turn; release the turn."""
        work = self._work(record, stream)
        record.started = record.issued
        try:
            finish(work, self._run(run, record, device))
        except Exception as error:  # noqa: BLE001 (the Work raises it)
            fail(work, error)
        finally:
            stream.leave()
        return work

    def _work(self, record: Record, stream: CallStream) -> Work[Any]:
        return Work(
            lambda: f"{record.header} on {self}",
            self.failure.mark_reported,
            self.streams.continuations,
            lambda: f"{record.kind}, {record.site},",
            blocked=partial(self._is_blocked, stream),
        )

    def _check_usable(self, kind: Kind, numbered_here: bool) -> None:
        """Raise the error of a call of ``kind`` if the group accepts no call now.

        ``numbered_here`` means that the calling thread is numbering another call.
        """
        if not self.state.usable:
            self.failure.mark_reported()
            raise self.state.unusable()
        if numbered_here:
            raise self._interrupted(kind)

    def _is_blocked(self, stream: CallStream) -> bool:
        """True if a call on ``stream`` would wait for a call that the calling thread is making."""
        return stream.is_mine() or self.state.is_making()

    def _interrupted(self, kind: Kind) -> DistBackendError:
        """Return the error for a call that a signal handler makes in the middle of another one."""
        open_calls = [r for r in self.context.recorder.records(self.members.id) if not r.ended]
        calls = [f"{record.header}, {record.site}" for record in open_calls if record.sync]
        return DistBackendError(
            f"{kind.name.lower()} on {self} cannot be made in the middle of"
            f" {calls[-1] if calls else 'another call'}: a signal handler interrupted that call,"
            " and each would wait for the other; expected the handler to set a flag that the"
            " program reads between its calls"
        )

    def _enqueue(self, stream: CallStream, run: Run, record: Record, spec: CallSpec) -> Work[Any]:
        work, device = self._work(record, stream), spec.device
        overlapping = run if isinstance(run, Overlapping) and device == "cpu" else None

        def make(run: Run) -> bool:
            """Run ``run``; return False if the call still has frames to send or receive."""
            try:
                result = self._run(run, record, device)
                completion, record.completion = record.completion, None
                if record.rest is not None:
                    return False
                finish(work, result, completion)
            except BaseException as error:  # noqa: BLE001 (the Work raises it)
                rest, record.rest = record.rest, None
                if rest is not None:
                    rest.end_before()
                fail(work, error)
            return True

        def task() -> None:
            before, stream.unended = stream.unended, None
            if before is not None and not (overlapping and overlapping.may_follow(before.run)):
                before.end()
                before = None
            record.start()
            if overlapping is None:
                make(run)
                return

            def end_before() -> None:
                if before is not None:
                    before.end()
                    record.start()  # the earlier call's time must not count for this call

            record.rest = CallTail(None if before is None else end_before)
            if not make(run):
                stream.unended = Unended(overlapping, partial(make, overlapping.end))

        stream.submit(task)
        return work

    def _run(self, run: Run, record: Record, device: str) -> Any:
        """Make the call in its turn; return its result.

        Sets ``record.completion`` if a device still has work to do for the call.
        """
        state = self.state
        if state.error is not None:
            record.end("the group was broken before its turn came")
            raise self.failure.reported(record, state.unusable())
        if (state.absent and self.failure.break_if_deserted(record)) or (
            state.refused and self.failure.break_if_refused(record)
        ):
            record.end(str(state.error))
            raise self.failure.reported(record, state.unusable())
        try:
            communicator = state.communicators.get(device) or state.communicator(device)
            annotate = self.context.recorder.annotate
            if annotate is None:
                result = run(communicator, record)
            else:
                with annotate(record.title):
                    result = run(communicator, record)
        except BaseException as error:  # also an interrupt: other members must not wait
            seen = self.failure.reported(record, self.failure.seen_by_user(record, error))
            record.end(str(seen))
            if seen is error:
                raise
            # Users do not need the traceback inside the transport; __context__ keeps it.
            raise seen from None
        if record.rest is None:
            record.ended = monotonic()
        if record.completion is not None:
            record.completion.explain_by(partial(self.failure.explain, record))
        return result

    # ------------------------------------------------------------------ the fast path

    def open_fast_path(self, met: bool) -> None:
        """Let the compiled core begin common calls from now on, also collectives if ``met``."""
        context, state, streams = self.context, self.state, self.streams
        if native is None or not state.usual or (state.fast_path is not None and not met):
            return
        # With a native handle to the ranks' shared memory, the fast path makes small calls itself.
        communicator = state.communicators["cpu"]
        handle = communicator.native_handle() if met else None
        rings = communicator.message_rings()
        # In the order of ``meshlib/_native/fast_path.c``.
        of_group = (self.members.id, self.ranks, self._resume, self._carry_message, self._run)
        of_streams = (state.order, streams.collectives, streams.of_peer)
        of_rank = (context.recorder, context.observers, LOGGER.isEnabledFor)
        parts = (*of_group, *of_streams, *of_rank, _OPS, np.ndarray)
        fast_path: FastPath = native.FastPath(handle, rings, met, parts)
        with state.lock:
            if state.usual:
                state.fast_path = fast_path

    def _resume(self, record: Record, status: int) -> None:
        """Continue a call that the fast path began; the fast path releases the turn."""

        def run(communicator: Communicator, call: Call) -> None:
            communicator.resume(call, status)

        self._run(run, record, "cpu")

    def _carry_message(self, record: Record, kind: int, array: Flat) -> None:
        """Send or receive the NumPy array of a call that the fast path has opened."""
        tag = record.header.extra

        def run(communicator: Communicator, call: Call) -> None:
            if kind == Kind.SEND:
                communicator.send(call, array.ravel(), record.peer, tag)
            else:
                communicator.recv(call, array.ravel(), record.peer, tag)

        self._run(run, record, "cpu")

    def take_over(self, packed: bytes, spec: CallSpec) -> None:
        """Continue the call ``spec``, which compiled code began; ``packed`` is its header."""
        streams, peer = self.streams, spec.peer
        record = self.context.recorder.open(
            self.members.id, packed, spec.nbytes, peer, True, self.members.seconds
        )
        record.started = record.issued
        message = peer != COLLECTIVE
        stream = streams.of_peer(spec.kind, peer, spec.extra) if message else streams.collectives

        def resume(communicator: Communicator, call: Call) -> None:
            communicator.resume(call, core.AGAIN)  # type: ignore[union-attr]

        entered = stream.try_enter()
        try:
            self._run(spec.run if message else resume, record, "cpu")
        finally:
            if entered:
                stream.leave()

    # ------------------------------------------------------------------ the end

    def with_derived(self) -> list[CallQueue]:
        """Return this queue, and those of the groups derived from its group."""
        return [self, *(queue for one in self._derived for queue in one.with_derived())]

    def release(self) -> None:
        """Release the communicators if the group is broken and has no open call.

        The same applies to each derived group.
        """
        for queue in self.with_derived():
            if queue.state.lifecycle is Lifecycle.BROKEN and queue.streams.is_idle():
                queue.state.release()

    def close(self, drain: float = DRAIN_SECONDS) -> None:
        """Wait at most ``drain`` seconds for open calls to end, then release everything.

        Derived groups are closed first, in the same way.
        """
        for derived in self._derived:
            derived.close(drain)
        state = self.state
        if state.destroyed:
            return
        seconds = 0.0 if state.error is not None else drain
        if state.in_jit is not None:
            state.in_jit.close(seconds)
        idle = self.streams.drain(Deadline.after(seconds), state.is_receiving)
        with state.lock:
            state.advance(Lifecycle.DESTROYED)
            state.retired = True
        state.close(idle=idle)
        self.streams.join()

    def __repr__(self) -> str:
        return repr(self.members)
