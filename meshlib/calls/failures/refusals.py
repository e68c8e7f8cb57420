"""``Refusals``: collectives that a member does not make, as its arguments are wrong.

Such a call still gets its number in the order of the group. Where every member's arguments are
wrong, which is the usual mistake, the members stay in step and the group stays usable. Where only
some are, the others would wait in vain: an event of the job's log tells them, and they raise
``CollectiveMismatchError``, which says what was wrong, on which rank, at which line.
"""

from __future__ import annotations

from contextlib import suppress

from meshlib.calls.context import RankContext
from meshlib.calls.failures.failure import Failure
from meshlib.calls.shortcut import CallOrder
from meshlib.calls.spec import CallSpec
from meshlib.calls.state import Fate
from meshlib.events.events import Refused
from meshlib.events.log import STORE_SECONDS, publish
from meshlib.recording.recorder import COLLECTIVE, Record
from transport.call import Call, Kind
from transport.communicators.base import Communicator
from transport.errors import CollectiveMismatchError, DistStoreError

_MESSAGES = (Kind.SEND, Kind.RECV)


def _never_made(communicator: Communicator, call: Call) -> None:
    raise AssertionError("a refused call is not made")


class Refusals:
    """Of the group of ``fate``, whose calls ``order`` numbers; ``failure`` breaks it."""

    def __init__(
        self, context: RankContext, fate: Fate, failure: Failure, order: CallOrder
    ) -> None:
        self.ahead: dict[int, Refused] = {}
        """By number: other members' refusals of calls that this rank has not come to. It changes
        under the lock of the group's ``Fate``."""
        self._context = context
        self._fate = fate
        self._failure = failure
        self._order = order

    def refuse(self, kind: Kind, error: Exception) -> None:
        """Number and record a call that this rank does not make, as it raises ``error``, and tell.

        Messages have no place in the order of the group, and nobody is told of them.
        """
        context, fate = self._context, self._fate
        members = fate.members
        if kind in _MESSAGES:
            return
        what = f"{type(error).__name__}: {error}"
        with fate.lock:
            if not fate.usable:
                return
            packed = self._order.next_header(CallSpec(Kind.REFUSED, _never_made, extra=kind))
            record = context.recorder.open(members.id, packed, 0, COLLECTIVE, True, members.seconds)
            record.started = record.issued
            record.end(what)
            number = record.header.sequence
            self.ahead.pop(number, None)
        if len(members.ranks) == 1:
            return
        message = (
            f"rank {members.global_rank} could not make call #{number} {kind.name.lower()} on"
            f" {members}, {record.site}: {what}"
        )
        with suppress(DistStoreError):
            store = context.store.with_patience(STORE_SECONDS)
            publish(store, Refused(members.id, number, message))

    def hear(self, refusal: Refused) -> None:
        """Break the group if this rank has made the call of ``refusal``, or else when it does."""
        with self._fate.lock:
            if self._order.sequence < refusal.sequence:
                self.ahead.setdefault(refusal.sequence, refusal)
                for end in self._failure.unusual:
                    end()
                return
        for record in self._context.recorder.records(self._fate.members.id):
            header = record.header
            if record.peer == COLLECTIVE and header.sequence == refusal.sequence:
                if header.kind == Kind.REFUSED:
                    return
                break
        self._break(refusal)

    def break_if_refused(self, record: Record) -> bool:
        """Break the group if another member has refused ``record``'s call; say whether."""
        if record.peer != COLLECTIVE:
            return False
        with self._fate.lock:
            refusal = self.ahead.pop(record.header.sequence, None)
        if refusal is not None:
            self._break(refusal)
        return refusal is not None

    def _break(self, refusal: Refused) -> None:
        self._failure.fail_everywhere(CollectiveMismatchError(refusal.message))
