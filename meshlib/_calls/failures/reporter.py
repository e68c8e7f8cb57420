"""Turns one rank's error into a report that every member raises.

The protocol uses the job's store. Each rank's watcher follows the store's log of events
(``events``).

1. A rank whose call fails tries to become the reporter of its group, by being the first to
   write ``failure/<group>``. The others wait for its report.
2. The reporter appends a ``Query``. Each watcher answers with a statement: the rank's last calls
   in the group and the Python stack of its main thread. A rank without an answer is silent.
3. The reporter writes an ``Abort`` with the full message. Each watcher marks the group as broken
   and aborts its communicators, which wakes blocked threads. All raise the same message.

A ``RankLost`` event announces a rank that disappears: from the store's server (a will) or from the
launcher's agent. It breaks every group of that rank.

A rank that leaves in good order lists in a ``Leave`` event the groups on which it has made calls.
Its channels there close, which wakes the peers that wait for it. The other groups go on without it,
and break when a call needs it, because it will never open a channel there.
"""

from __future__ import annotations

import os
import time

from meshlib._calls.failures.messages import (
    ANSWER_SECONDS,
    lost_message,
    mismatch_message,
    timeout_message,
)
from meshlib._calls.failures.statements import Statement, last_calls
from meshlib._calls.state import GroupState
from meshlib._events.events import Abort, Query
from meshlib._events.log import STORE_SECONDS, answer_key, publish
from meshlib._recording.recorder import Record
from transport._errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    HeaderMismatchError,
    PeerLostError,
    RankFailedError,
    StoreTimeoutError,
)
from transport._store.base import Store
from transport._waiting.deadline import Deadline

DOUBTFUL_SECONDS = 0.15
# A connection can break a moment before the reason arrives.
REASON_SECONDS = 0.4
# The time that other members wait for the report before they raise their own error.
REPORT_SECONDS = 3.0
# The time that a late rank has to reach a mismatched call, for the message's table of calls.
ARRIVAL_SECONDS = 0.25
_ARRIVAL_PAUSE = 0.02


class Reporter:
    """Finds out why a call failed, and reports it to all members of the group of ``state``."""

    def __init__(self, state: GroupState, store: Store) -> None:
        self._state = state
        self._group = state.members
        self._store = store.with_grace(STORE_SECONDS)

    def explain(self, record: Record, error: DistError) -> DistError:
        """Return the error that all members raise for ``record``'s failure.

        Blocks for about ``REPORT_SECONDS``, or ``STORE_SECONDS`` if the store does not answer. A
        rank that cannot reach the store raises its own error. Breaks the group.
        """
        group, state = self._group, self._state
        if isinstance(error, PeerLostError) and group.ranks[error.peer] not in state.departed:
            known = state.await_failure(REASON_SECONDS)
            if known is not None:
                return known
        mine = os.urandom(8).hex()
        try:
            key = f"failure/{group.id}"
            won = self._store.compare_set(key, "", mine) == mine.encode()
            if not won and (failure := state.await_failure(REPORT_SECONDS)):
                return failure
            event = self._investigate(record, error, mine)
            if not won:
                # The first reporter is gone or stuck: use this rank's own report.
                return event.exception()
            if known := state.await_failure(0):
                return known
            publish(self._store, event)
            failure = state.await_failure(REPORT_SECONDS)
            return failure or event.exception()
        except DistStoreError as store_error:
            # If the rank that served the store is lost, its loss is reported soon.
            if known := state.await_failure(REASON_SECONDS):
                return known
            kind, lost = self._kind_of(error)
            message = (
                f"{group} failed on rank {group.global_rank}: {error} "
                f"(and the store cannot be reached for details: {store_error})"
            )
            return RankFailedError(message, lost) if kind is RankFailedError else kind(message)

    def _investigate(self, record: Record, error: DistError, ticket: str) -> Abort:
        group = self._group
        doubtful = group.ranks[error.peer] if isinstance(error, PeerLostError) else None
        statements = self._query(ticket, record.header.sequence, doubtful)
        kind, lost = self._kind_of(error)
        if isinstance(error, HeaderMismatchError):
            self._await_arrivals(record.header.sequence, statements)
            message = mismatch_message(group, record, error, statements)
        elif isinstance(error, CommunicatorTimeoutError):
            message = timeout_message(group, record, statements)
        elif isinstance(error, PeerLostError):
            message = lost_message(group, record, error, statements, self._state.departed)
        elif isinstance(error, RankFailedError):
            message = str(error)
        else:
            message = f"{group} failed on rank {group.global_rank}: {error}"
        return Abort(group.id, kind.__name__, message, lost)

    def _kind_of(self, error: DistError) -> tuple[type[DistError], int | None]:
        """Return the class of the error that all members raise, and the lost rank, if any."""
        if isinstance(error, HeaderMismatchError):
            return CollectiveMismatchError, None
        if isinstance(error, CommunicatorTimeoutError):
            return CollectiveTimeoutError, None
        if isinstance(error, PeerLostError):
            return RankFailedError, self._group.ranks[error.peer]
        if isinstance(error, RankFailedError):
            return RankFailedError, error.rank
        return DistBackendError, None

    def _await_arrivals(self, sequence: int, statements: dict[int, Statement]) -> None:
        """Query again, for a moment, until all answering members have reached the collective."""
        deadline = Deadline.after(ARRIVAL_SECONDS)
        while not deadline.expired and not self._state.await_failure(0):
            if all(statement.has_arrived(sequence) for statement in statements.values()):
                return
            time.sleep(_ARRIVAL_PAUSE)
            statements.update(self._query(os.urandom(8).hex(), sequence, None))

    def _query(self, ticket: str, sequence: int, doubtful: int | None) -> dict[int, Statement]:
        """Return the statements of the members that answer in time, by global rank.

        ``doubtful`` is a rank that is probably gone; it gets less time.
        """
        group, state = self._group, self._state
        publish(self._store, Query(group.id, sequence, ticket))
        deadline = Deadline.after(ANSWER_SECONDS)
        found: dict[int, Statement] = {}
        departed = state.departed
        for rank in group.ranks:
            if state.await_failure(0):
                break
            if rank in departed:
                if (statement := last_calls(self._store, rank, group.id)) is not None:
                    found[rank] = statement
                continue
            grace = deadline.remaining()
            if rank == doubtful:
                grace = min(grace, DOUBTFUL_SECONDS)
            try:
                text = self._store.get(answer_key(ticket, rank), timeout=grace)
            except StoreTimeoutError:
                continue
            found[rank] = Statement.unpack(text)
        return found
