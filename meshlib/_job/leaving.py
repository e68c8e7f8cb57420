"""The end of a job: ranks that leave in good order compare the calls that they have made.

During the job, the next frame between two members reveals an earlier mismatch. No frame follows the
last call, so this module checks the last calls. For each group, a leaving rank publishes the number
of its last call and the hash of all its calls (``CallHeader.history``), and compares both with the
ranks that left before. Its last calls stay in the store for the remaining ranks' error messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from meshlib._calls.failures.reporter import Reporter
from meshlib._calls.failures.statements import put_last_calls
from meshlib._calls.state import GroupState
from meshlib._events.events import Chain, Chains, Departures, Leave
from meshlib._events.log import publish
from meshlib._recording.recorder import COLLECTIVE, FlightRecorder, Record
from transport._errors import (
    CollectiveMismatchError,
    DistError,
    DistStoreError,
    HeaderMismatchError,
)
from transport._store.base import Store

PARTING_SECONDS = 5.0
"""The time that the store has to answer a leaving rank."""


def chains(groups: Iterable[GroupState], joined: Iterable[str]) -> dict[str, Chain | None]:
    """Return the number of the last call and the hash of all calls for each group in ``joined``."""
    complete = {
        group.members.id: (group.order.sequence, group.order.history)
        for group in groups
        if group.error is None
    }
    return {group_id: complete.get(group_id) for group_id in sorted(joined)}


def announce_departure(
    store: Store, rank: int, found: Chains, groups: Iterable[GroupState], records: FlightRecorder
) -> bool:
    """Announce that ``rank`` leaves after the calls ``found``; return False if the store fails."""
    mine = {
        group.members.id: group.order.sequence
        for group in groups
        if found.get(group.members.id) and len(group.members.ranks) > 1
    }
    with suppress(DistStoreError):
        store = store.with_grace(PARTING_SECONDS)
        if mine:
            put_last_calls(store, rank, mine, records.records())
        publish(store, Leave(rank, found))
        return True
    return False


def count_out(store: Store, size: int, lost: int, linger: float) -> None:
    """Count this rank as gone. ``lost`` of the ``size`` ranks are already gone.

    The rank that serves the store waits up to ``linger`` seconds for all ranks to be gone.
    """
    with suppress(DistStoreError):
        store = store.with_grace(PARTING_SECONDS)
        if store.add("left", 1) + lost >= size:
            store.set("all-left", b"1")
        elif store.serves and not lost:
            store.wait(["all-left"], timeout=linger)


def find_mismatch(
    store: Store,
    groups: Iterable[GroupState],
    found: Chains,
    left: Sequence[Departures],
    records: FlightRecorder,
    reported: Collection[str] = (),
) -> DistError | None:
    """Return the error of the first group whose members left after different calls, or None.

    ``left`` has the calls of the ranks that left before this one. ``reported`` has the messages of
    errors that were already raised: one mismatch may have broken several groups. If one rank made
    more calls than another, only the calls of both are compared.
    """
    for group in groups:
        failure = group.await_failure(0)
        if isinstance(failure, CollectiveMismatchError) and str(failure) not in reported:
            return failure
        members = group.members
        mine = found.get(members.id)
        if failure is not None or mine is None:
            continue
        others: dict[Chain, list[int]] = {}
        for departures in left:
            for theirs, ranks in departures.chains(members.id).items():
                if theirs is not None and theirs != mine:
                    others.setdefault(theirs, []).extend(ranks)
        if not others:
            continue
        calls = _collectives(records, members.id)
        differing = [
            (place, theirs)
            for theirs, ranks in others.items()
            if _differ(mine, theirs, calls)
            for place in members.places_of(ranks)
        ]
        if not differing:
            continue
        place, theirs = min(differing)
        why = f"rank {members.ranks[place]} had made other calls when it left the job"
        record = calls.get(theirs[0])
        if record is None:
            return CollectiveMismatchError(
                f"the members of {members} made different calls up to #{theirs[0]}, whose"
                f" records no longer exist: {why}"
            )
        error = HeaderMismatchError(why, place, record.header, None)
        return Reporter(group, store).explain(record, error)
    return None


def _collectives(records: FlightRecorder, group_id: str) -> dict[int, Record]:
    found = [record for record in records.records(group_id) if record.peer == COLLECTIVE]
    return {record.header.sequence: record for record in found}


def _differ(mine: Chain, theirs: Chain, calls: Mapping[int, Record]) -> bool:
    """True if the calls differ up to the last call of the rank that left earlier."""
    if mine[0] == theirs[0]:
        return mine[1] != theirs[1]
    after = calls.get(theirs[0] + 1)
    return after is not None and after.header.history != theirs[1]
