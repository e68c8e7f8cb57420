"""``Failure``: how a group breaks, and which errors users see.

A call with invalid arguments is numbered but not made. Usually all members' arguments are invalid;
then the members stay in step and the group stays usable. If only some are, the other members would
wait until their deadline. An event in the job's log notifies them, and they raise
``CollectiveMismatchError`` with the reason, the source line and the rank.
"""

from __future__ import annotations

from contextlib import suppress

from meshlib._calls.failures.reporter import Reporter
from meshlib._calls.spec import CallSpec
from meshlib._calls.state import GroupState, Lifecycle
from meshlib._events.events import Abort, Departures, Refused
from meshlib._events.log import STORE_SECONDS, publish
from meshlib._recording.recorder import COLLECTIVE, Record
from transport._calls.call import Call
from transport._calls.header import ONE_SIDED, CallHeader, Kind
from transport._communicators.base import Communicator
from transport._errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    HeaderMismatchError,
    PeerLostError,
    RankFailedError,
)

# Errors about other ranks do not explain why those ranks lost this rank.
_OF_OTHERS = (PeerLostError, CommunicatorTimeoutError, HeaderMismatchError, RankFailedError)
_MESSAGES = (Kind.SEND, Kind.RECV)
# Calls whose timeout leaves the group usable.
_ENDED_BY_TIME = {Kind.RECV, *ONE_SIDED}


def _never_made(communicator: Communicator, call: Call) -> None:
    raise AssertionError("a refused call is not made")


class Failure:
    """Breaks a group: on this rank through ``state``, on other ranks through the store."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._context = state.context
        self._members = state.members

    # ------------------------------------------------------------------ breaking

    def fail(self, error: DistError) -> None:
        """Break the group on this rank: calls under way and later calls raise the error."""
        state = self._state
        with state.lock:
            communicators = state.open_communicators()
            # A communicator aborted earlier has its own reason, which others may have reported
            # first.
            for communicator in communicators:
                if communicator.abort_reason is not None:
                    error = self._own(CommunicatorAbortedError(communicator.abort_reason), error)
            changed = state.advance(Lifecycle.BROKEN, error)
        for notify in state.failure_listeners:
            notify(error)
        if changed:  # False if this rank and another rank's report both break the group
            self._context.log.info("%s is broken: %s", self._members, error)
        self._context.note_failure(error)
        for communicator in communicators:
            communicator.abort(str(error))

    def fail_everywhere(self, error: DistError) -> None:
        """Break the group with ``error`` on all members, unless it is already broken."""
        if self._state.error is None:
            context = self._context
            with suppress(DistStoreError):
                # Other members must get the reason before this rank's channels close.
                publish(context.store.with_grace(STORE_SECONDS), Abort.of(self._members.id, error))
            self.fail(error)

    def mark_reported(self) -> None:
        """Note that the program has seen the failure, if the group is broken."""
        if self._state.error is not None:
            self._state.retire()

    def reported(self, record: Record, error: BaseException) -> BaseException:
        """Return ``error``; if ``record`` is synchronous, note that the program sees it now."""
        if record.sync:
            self.mark_reported()
        return error

    # ------------------------------------------------------------------ members that leave

    def do_without(self, left: Departures) -> None:
        """Note that ranks have left the job.

        If a departed member made no call on the group, open and later calls that need it raise
        ``RankFailedError``. If it made calls, closing its channels wakes the ranks that need it.
        Messages that it sent are still received.
        """
        members, state = self._members, self._state
        with state.lock:
            if left in state.departures:
                return
            absent = members.places_of(left.without(members.id))
            state.departures = (*state.departures, left)
            if absent:
                state.absent = (*state.absent, *absent)
                state.fast_path = None
            communicators = state.open_communicators()
        state.lose(communicators, left.ranks)
        if not absent or state.destroyed:
            return
        # Later calls check for absent members themselves.
        for record in self._context.recorder.records(members.id):
            if record.started and not record.ended:
                self.break_if_deserted(record)

    def break_if_deserted(self, record: Record) -> bool:
        """Break the group if ``record``'s call needs an absent member; return True if so."""
        absent, members = self._state.absent, self._members
        for place in absent if record.peer == COLLECTIVE else (record.peer,):
            if place in absent:
                rank = members.ranks[place]
                left = f"rank {rank} has left the job without a call on {members}"
                needs = f"rank {members.global_rank} needs it in {record.header}, {record.site}"
                self.fail_everywhere(RankFailedError(f"{left}; {needs}", rank))
                return True
        return False

    # ------------------------------------------------------------------ refused calls

    def refuse(self, kind: Kind, error: Exception) -> None:
        """Number and record a call that raised ``error`` here, and report it to the other members.

        Point-to-point calls have no number in the group's order and are not reported.
        """
        context, state, members = self._context, self._state, self._members
        if kind in _MESSAGES:
            return
        what = f"{type(error).__name__}: {error}"
        with state.lock:
            if not state.usable:
                return
            packed = state.order.next_header(CallSpec(Kind.REFUSED, _never_made, extra=kind))
            record = context.recorder.open(members.id, packed, 0, COLLECTIVE, True, members.seconds)
            record.started = record.issued
            record.end(what)
            number = record.header.sequence
            state.refused.pop(number, None)
        if len(members.ranks) == 1:
            return
        message = (
            f"rank {members.global_rank} could not make call #{number} {kind.name.lower()} on"
            f" {members}, {record.site}: {what}"
        )
        with suppress(DistStoreError):
            store = context.store.with_grace(STORE_SECONDS)
            publish(store, Refused(members.id, number, message))

    def on_refusal(self, refusal: Refused) -> None:
        """Break the group if this rank has made the call of ``refusal``, or as soon as it does."""
        state = self._state
        with state.lock:
            if state.order.sequence < refusal.sequence:
                state.refused.setdefault(refusal.sequence, refusal)
                state.fast_path = None
                return
        for record in self._context.recorder.records(self._members.id):
            header = record.header
            if record.peer == COLLECTIVE and header.sequence == refusal.sequence:
                if header.kind == Kind.REFUSED:
                    return
                break
        self._break_by(refusal)

    def break_if_refused(self, record: Record) -> bool:
        """Break the group if another member has refused ``record``'s call; return True if so."""
        if record.peer != COLLECTIVE:
            return False
        with self._state.lock:
            refusal = self._state.refused.pop(record.header.sequence, None)
        if refusal is not None:
            self._break_by(refusal)
        return refusal is not None

    def _break_by(self, refusal: Refused) -> None:
        self.fail_everywhere(CollectiveMismatchError(refusal.message))

    # ------------------------------------------------------------------ errors for the user

    def seen_by_user(self, record: Record, error: BaseException) -> BaseException:
        """Return the exception that the user gets for ``error``; break the group if needed."""
        state, members = self._state, self._members
        if state.destroyed:
            if known := state.await_failure(0):  # it was broken before
                return self._own(error, known) if isinstance(error, DistError) else known
            return DistBackendError(f"{members} was destroyed while {record.header} was under way")
        # These errors leave no partial data on the wire, so the group stays usable.
        if record.header.kind == Kind.RECV and isinstance(error, HeaderMismatchError):
            return CollectiveMismatchError(f"{error} ({record.header} on {members})")
        if record.header.kind in _ENDED_BY_TIME and isinstance(error, CommunicatorTimeoutError):
            return CollectiveTimeoutError(f"{error} ({record.header} on {members})")
        if isinstance(error, CommunicatorAbortedError) and (known := state.await_failure(1.0)):
            return self._own(error, known)
        reporter = Reporter(state, self._context.store)
        if isinstance(error, DistError):
            explained = reporter.explain(record, error)
            self.fail(explained)
            return self._own(error, explained)
        # KeyboardInterrupt, MemoryError …: the user gets it unchanged, but the other members must
        # not wait for a rank that stopped in the middle of a call.
        rank = members.global_rank
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        left = f"rank {rank} left {record.header} on {members}: {why}"
        self.fail(reporter.explain(record, RankFailedError(left, rank)))
        return error

    def _own(self, error: DistError, reported: DistError) -> DistError:
        """Return the error to raise here for ``error``, if ``reported`` is the group's error.

        ``reported`` may be another rank's report that it lost this rank. Then this rank's own error
        explains more.
        """
        rank = self._members.global_rank
        if (
            not isinstance(reported, RankFailedError)
            or reported.rank != rank
            or str(reported) in str(error)
        ):
            return reported
        if isinstance(error, _OF_OTHERS):
            return reported
        own = DistBackendError(f"{self._members} failed on rank {rank}: {error}")
        own.__cause__ = reported
        return own

    def explain(self, record: Record, error: Exception, at_fault: CallHeader | None) -> Exception:
        """Return the exception that the user gets for the ``error`` of a device in ``record``.

        ``at_fault`` is the call that failed, if it was another one.
        """
        if known := self._state.await_failure(0):
            self.mark_reported()
            return known
        if at_fault is not None and at_fault != record.header:
            mine = self._context.recorder.records(self._members.id)
            record = next((r for r in mine if r.header == at_fault), record)
        seen = self.seen_by_user(record, error)
        self.mark_reported()
        return seen if isinstance(seen, Exception) else error
