"""``Door``: the one way into the calls of a group, of every kind.

Order, deadlines, recording, the shortcut and failure meet in ``Door.issue`` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

from meshlib.calls.failures.failure import Failure
from meshlib.calls.lane import Lane
from meshlib.calls.lanes import Lanes
from meshlib.calls.legs import Leg
from meshlib.calls.members import Members
from meshlib.calls.shortcut import SHORT, Shortcut
from meshlib.calls.spec import CallSpec, InPlace, Run, Straight
from meshlib.calls.state import GroupState
from meshlib.calls.work import Work
from meshlib.recording.recorder import COLLECTIVE, Record
from transport.call import Call, CallHeader, Kind
from transport.communicators.base import Communicator
from transport.condition import has
from transport.deadline import Deadline, Timeout, to_seconds
from transport.errors import DistBackendError
from transport.native import core
from transport.operands.reduce_op import ReduceOp

T = TypeVar("T")

# An enumeration looks its members up in Python, which takes a tenth of a microsecond.
_ALL_REDUCE = Kind.ALL_REDUCE


class Door:
    """Makes the calls of the group of ``state``.

    ``ranks`` are the members' global ranks, ``rank`` this one's place among them, -1 if it has
    none.
    """

    def __init__(self, state: GroupState, failure: Failure) -> None:
        members, context = state.members, state.context
        self.state: GroupState = state
        self.members: Members = members
        self.ranks: tuple[int, ...] = members.ranks
        self.rank: int = members.rank()
        self.failure: Failure = failure
        # Held while a call is numbered and queued; the compiled core looks at it without waiting.
        self._numbering = Lock()
        name = members.group_desc or members.id
        self.lanes: Lanes = Lanes(name, context.rank, context.adopt_thread)
        self._context = context
        state.turns = self.lanes.collectives

    def issue(
        self, what: CallSpec | InPlace, async_op: bool = False, timeout: Timeout | None = None
    ) -> Any:
        """Make one call: ``run(communicator, call)`` of ``what`` at its turn.

        Collectives run in the order of issue; so do point-to-point calls with one peer, direction
        and tag, independently of all others. ``timeout``: by default the group's. An asynchronous
        send for which there is room at the receiver is made in the caller's thread.

        Returns what ``run`` returns (a ``Message`` for a receive), or a ``Work`` if ``async_op``.
        Raises ValueError for a device that has no backend and after the group was destroyed; what
        broke it if it is broken; ``DistBackendError`` in a signal handler that has interrupted a
        call which this one would have to wait for.
        """
        seconds = self.members.seconds if timeout is None else self._seconds(what, timeout)
        state = self.state
        shortcut = state.shortcut
        if shortcut is not None and not async_op:
            try:
                result = shortcut.issue(what, seconds)
            except Exception as error:
                self._note_refused(what, error)
                raise
            if result is not NotImplemented:
                return result
        spec = self._spell_out(what) if isinstance(what, tuple) else what
        kind, run, device, peer = spec.kind, spec.run, spec.device, spec.peer
        context = self._context
        if device != "cpu":
            self.checked(kind, self._check_device, device)
        if context.observers and peer == COLLECTIVE:
            run = self._observed(spec)
        numbered_here = has(state.lock)
        with state.lock:
            self._check_usable(kind, numbered_here)
            lanes = self.lanes
            message = peer != COLLECTIVE
            lane = lanes.of_peer(kind, peer, spec.extra) if message else lanes.collectives
            if not async_op and self._is_blocked(lane):
                raise self._interrupted(kind)
            with self._numbering:
                packed = state.order.next_header(spec)
                record = context.recorder.open(
                    self.members.id, packed, spec.nbytes, peer, not async_op, seconds
                )
                if context.log.detailed:
                    run = context.log.around(run, record, self.members)
                inline = (not async_op or kind is Kind.SEND) and lane.try_enter()
                # Nobody else sends to that peer now, and takes the room.
                if inline and async_op and not self._ends_at_once(spec):
                    lane.leave()
                    inline = False
                work = None if inline else self._enqueue(lane, run, record, what, spec)
        if work is not None:
            return work if async_op else work.outcome()
        if async_op:
            return self._at_once(lane, run, record, device)
        record.started = record.issued
        try:
            result = self._run(run, record, device)
            if device == "cpu" and (shortcut is None or not shortcut.met):
                self.open_shortcut(kind in SHORT)
        finally:
            lane.leave()
        if record.completion is not None:
            completion, record.completion = record.completion, None  # the record outlives it
            completion.join()
        return result

    def checked(self, kind: Kind, check: Callable[..., T], *arguments: Any) -> T:
        """Return ``check(*arguments)``, which finds out whether the arguments of a call are right.

        What it raises the other members are told, so that they do not wait: see ``Failure.refuse``.
        """
        try:
            return check(*arguments)
        except Exception as error:
            self.failure.refuse(kind, error)
            raise

    def _seconds(self, what: CallSpec | InPlace, timeout: Timeout) -> float:
        kind = _ALL_REDUCE if isinstance(what, tuple) else what.kind
        return self.checked(kind, to_seconds, timeout)

    def _spell_out(self, what: InPlace) -> CallSpec:
        array, op, spelled_out = what
        return self.checked(_ALL_REDUCE, spelled_out, array, op)

    def _note_refused(self, what: CallSpec | InPlace, error: Exception) -> None:
        """Tell the other members if the ``error`` of a shortcut is in the call's arguments."""
        if isinstance(what, tuple):
            array, op, spelled_out = what
            try:
                spelled_out(array, op)
            except Exception:  # noqa: BLE001 (it is ``error`` once more)
                self.failure.refuse(_ALL_REDUCE, error)

    def _check_device(self, device: str) -> None:
        backends = self.members.backends
        # Arrays on a GPU have a way by the host's backend.
        if device not in backends and not (device == "cuda" and "cpu" in backends):
            has = self.members.backend
            raise ValueError(f"{self} has no backend for arrays on {device!r}; it has {has!r}")

    def _is_straight(self, what: CallSpec | InPlace, spec: CallSpec) -> bool:
        """Whether a call is what ``Straight`` says."""
        if spec.device != "cpu" or (self._context.observers and spec.peer == COLLECTIVE):
            return False
        return isinstance(spec.run, Straight) or (isinstance(what, tuple) and what[0].flags.carray)

    def _observed(self, spec: CallSpec) -> Run:
        header = CallHeader(
            0, spec.elements, spec.root, spec.kind, spec.dtype, spec.op, extra=spec.extra
        )
        run = spec.run
        for observer in list(self._context.observers.values()):
            run = observer(self.members, header, spec.device, run)
        return run

    def _ends_at_once(self, spec: CallSpec) -> bool:
        """Whether a send needs no thread of its own to have nobody wait for it."""
        communicator = self.state.communicators.get(spec.device)
        return communicator is not None and communicator.takes_at_once(spec.peer, spec.nbytes)

    def _at_once(self, lane: Lane, run: Run, record: Record, device: str) -> Work[Any]:
        """Make a call for which somebody may wait later; its turn is there, and given back."""
        work = self._work(record, lane)
        record.started = record.issued
        try:
            work.finish(self._run(run, record, device), None)
        except Exception as error:  # noqa: BLE001 (it belongs to whoever waits)
            work.fail(error)
        finally:
            lane.leave()
        return work

    def _work(self, record: Record, lane: Lane) -> Work[Any]:
        return Work(
            lambda: f"{record.header} on {self}",
            self.failure.note_told,
            self.lanes.continuations,
            lambda: f"{record.kind}, {record.site},",
            blocked=partial(self._is_blocked, lane),
        )

    def _check_usable(self, kind: Kind, numbered_here: bool) -> None:
        """Raise what a call of ``kind`` raises on a group that takes none now.

        ``numbered_here``: the calling thread is just numbering another one.
        """
        if not self.state.usable:
            self.failure.note_told()
            raise self.state.unusable()
        if numbered_here:
            raise self._interrupted(kind)

    def _is_blocked(self, lane: Lane) -> bool:
        """Whether the calling thread is in the middle of a call for which one on ``lane`` waits."""
        return lane.is_mine() or self.state.is_making()

    def _interrupted(self, kind: Kind) -> DistBackendError:
        """Return what a call raises that a signal handler makes in the middle of another one."""
        open_calls = [r for r in self._context.recorder.records(self.members.id) if not r.ended]
        calls = [f"{record.header}, {record.site}" for record in open_calls if record.sync]
        return DistBackendError(
            f"{kind.name.lower()} on {self} cannot be made in the middle of"
            f" {calls[-1] if calls else 'another call'}: a signal handler has interrupted that, and"
            " each would wait for the other; expected the handler to set a flag that the program"
            " reads between its calls"
        )

    def _enqueue(
        self, lane: Lane, run: Run, record: Record, what: CallSpec | InPlace, spec: CallSpec
    ) -> Work[Any]:
        work, device = self._work(record, lane), spec.device

        def task() -> None:
            try:
                record.start()
                result = self._run(run, record, device)
                completion, record.completion = record.completion, None
                work.finish(result, completion)
            except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits)
                work.fail(error)

        legs = self.lanes.collectives
        if legs.overlapping and lane is legs and self._is_straight(what, spec):
            lane.submit(Leg(legs, task, record.nbytes, record.start))
        else:
            lane.submit(task)
        return work

    def _run(self, run: Run, record: Record, device: str) -> Any:
        """Make the call, whose turn has come; return its result.

        ``record.completion`` is the end of what a device still does for it.
        """
        state = self.state
        if state.error is not None:
            record.end("the group was broken before its turn came")
            raise self.failure.told(record, state.unusable())
        if (state.absent and self.failure.break_if_deserted(record)) or (
            state.refused and self.failure.break_if_refused(record)
        ):
            record.end(str(state.error))
            raise self.failure.told(record, state.unusable())
        try:
            communicator = state.communicators.get(device) or state.communicator(device)
            annotate = self._context.recorder.annotate
            if annotate is None:
                result = run(communicator, record)
            else:
                with annotate(record.title):
                    result = run(communicator, record)
        except BaseException as error:
            seen = self.failure.told(record, self.failure.seen_by_user(record, error))
            record.end(str(seen))
            if seen is error:
                raise
            # Where a transport noticed says nothing to the user; it stays in __context__.
            raise seen from None
        record.ended = monotonic()
        if record.completion is not None:
            record.completion.explain_by(partial(self.failure.explain, record))
        return result

    # ------------------------------------------------------------------ the shortcut

    def open_shortcut(self, met: bool) -> None:
        """Have the compiled core open the usual calls from now on, collectives too if ``met``."""
        context, state, lanes = self._context, self.state, self.lanes
        if core is None or not state.usual or (state.shortcut is not None and not met):
            return
        # It makes small calls where it has an outline of the memory that the ranks share.
        outline = state.communicators["cpu"].outline() if met else None
        # What ``issue`` works with, in the order of ``transport/native/calls/shortcut.c``.
        of_group = (self.members.id, self._resume, self._run, state.order, self._numbering)
        of_lanes = (*lanes.collectives.parts(), lanes.parts_of_peer)
        of_rank = (context.recorder, context.observers, context.log.levels)
        parts = (*of_group, *of_lanes, *of_rank)
        shortcut: Shortcut = core.Shortcut(outline, met, parts)
        with state.lock:
            if state.usual:
                state.shortcut = shortcut

    def _resume(self, record: Record, tensor: Any, op: ReduceOp | None) -> Any:
        """Go on with the all_reduce of ``tensor``, or without ``op`` the barrier, that the shortcut
        began; the turn is its own to give back.
        """

        def run(communicator: Communicator, call: Call) -> Any:
            communicator.resume(call, None if op is None else tensor.ravel(), op)
            return None if op is None else tensor

        return self._run(run, record, "cpu")

    def take_over(self, packed: bytes, spec: CallSpec) -> None:
        """Go on with the call ``spec``, which compiled code has begun; ``packed``: its header."""
        lanes, peer = self.lanes, spec.peer
        record = self._context.recorder.open(
            self.members.id, packed, spec.nbytes, peer, True, self.members.seconds
        )
        record.started = record.issued
        message = peer != COLLECTIVE
        lane = lanes.of_peer(spec.kind, peer, spec.extra) if message else lanes.collectives

        def resume(communicator: Communicator, call: Call) -> None:
            communicator.resume(call, None, None)

        entered = lane.try_enter()
        try:
            self._run(spec.run if message else resume, record, "cpu")
        finally:
            if entered:
                lane.leave()

    # ------------------------------------------------------------------ the end

    def drain(self, seconds: float) -> bool:
        """Let calls that were issued end; return whether all did within ``seconds``."""
        return self.lanes.drain(Deadline.after(seconds), self.state.is_receiving)

    def __repr__(self) -> str:
        return repr(self.members)
