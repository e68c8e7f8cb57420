"""Detection of ranks that wait for each other in different calls, long before a deadline.

Most mismatches are detected in the first frame that arrives (``transport._calls.header``). But some
exchange no frame: two ranks call on two groups of the same members in different orders, for
example. Each waits for a call that the other will never make.

A rank whose main thread has been blocked in one call for a while posts its ``CallStatus``. A rank
*waits for* each member that has not reached its call yet. Blocked ranks that wait for each other in
a cycle, a *tangle*, can never continue. That is a mismatch, which the ranks' groups then raise. A
rank that computes posts nothing, so a slow rank is never mistaken for a stuck one.

Waiting must cost almost nothing, whatever the number of ranks that wait for a slow one. A rank
posts its status once, and reads other statuses only when a counter shows new ones. Ranks that are
threads of one process share one thread for this, and the statuses that it has read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Protocol

from meshlib._calls.members import Members, even
from meshlib._diagnosis.shared_thread import SharedThread
from meshlib._diagnosis.tangles import CallStatus, find_tangle, tangle_message
from meshlib._events.events import Abort
from meshlib._events.log import publish
from meshlib._recording.call_report import report_calls
from meshlib._recording.recorder import COLLECTIVE, FlightRecorder, Record
from transport._errors import CollectiveMismatchError
from transport._store.base import Store
from transport._waiting.deadline import Deadline

TICK_SECONDS = 0.1
STALLED_SECONDS = 0.3
# The thread uses at most 1 / IDLE_PARTS of a core.
IDLE_PARTS = 10
# A rank posts this many of its last calls: ranks may have diverged some calls earlier.
CALLS_POSTED = 8
# The time for other members to post their status, once a tangle is confirmed.
REST_SECONDS = 0.2
_PAUSE_SECONDS = 0.05
_POSTED = "statuses"
# A rank reads at most this many statuses. Beyond that, deadlines still name missing ranks.
MOST_RANKS = 256


class Groups(Protocol):
    """An object that knows the groups of one rank."""

    def progress(self) -> list[tuple[Members, int]]:
        """Return the members of each group, and the number of its last collective."""
        ...


class StallDetector:
    """A watch on the main thread of one rank, which has ``groups``, until it is closed."""

    def __init__(
        self, rank: int, store: Store, recorder: FlightRecorder, main_thread: int, groups: Groups
    ) -> None:
        self.rank = rank
        self._recorder = recorder
        self._main_thread = main_thread
        self._groups = groups
        self.posted: CallStatus | None = None
        self._thread = _StallThread.of(store)
        self._thread.enter(self, store)

    def close(self) -> None:
        """Stop watching."""
        self._thread.leave(self)

    def post(self, store: Store, *, again: bool) -> CallStatus | None:
        """Return the rank's status, None unless it is blocked.

        Also post the status in ``store`` if it is new, or if ``again``.
        """
        record = self._blocked_in()
        if record is None:
            if self.posted is not None:
                store.set(status_key(self.rank), b"")
                self.posted = None
            return None
        before = self.posted
        if before is not None and before.place != (record.group, record.header.sequence):
            before = None
        if before is None or again:
            status = self._status(record, 0 if before is None else before.beat + 1)
            if status is None:
                return None
            self.posted = status
            store.set(status_key(self.rank), status.pack())
        if before is None:
            store.add(_POSTED, 1)  # last: a rank that reads the count must find the status
        return self.posted

    def _blocked_in(self) -> Record | None:
        """Return the collective in which this rank's main thread has been blocked for a while."""
        open_calls = [r for r in self._recorder.records() if not r.ended]
        blocking = [r for r in open_calls if r.sync]
        if len(blocking) != 1 or blocking[0].thread != self._main_thread:
            return None  # the main thread computes, or another thread may make the missing call
        last = blocking[0]
        if last.peer != COLLECTIVE or time.monotonic() - last.issued < STALLED_SECONDS:
            return None
        # Calls of one group run in order, so the first open one is the one that waits.
        return next(r for r in open_calls if r.group == last.group and r.peer == COLLECTIVE)

    def _status(self, record: Record, beat: int) -> CallStatus | None:
        """Return the rank's status in the call ``record``; None if its group is gone."""
        groups = self._groups.progress()
        group = next((members for members, _ in groups if members.id == record.group), None)
        if group is None:
            return None
        sequence = record.header.sequence
        recent = range(sequence - CALLS_POSTED + 1, sequence)
        before = [
            r
            for r in self._recorder.records(record.group)
            if r.peer == COLLECTIVE and r.header.sequence in recent
        ]
        return CallStatus(
            rank=self.rank,
            ranks=even(group.ranks) or group.ranks,
            on=str(group),
            reached={members.id: number for members, number in groups},
            calls=report_calls([*before, record]),
            beat=beat,
        )


class _StallThread(SharedThread[StallDetector]):
    """A thread that posts its ranks' statuses, and searches all statuses for tangles."""

    name = "stalls"

    def __init__(self) -> None:
        super().__init__()
        self._last_count = 0  # of posted statuses, at the last search
        self._suspects: dict[int, CallStatus] = {}

    def work(self, store: Store, ending: threading.Event) -> None:
        pause = TICK_SECONDS
        while not ending.wait(pause):
            started = time.thread_time()
            self._tick(store, ending)
            pause = max(TICK_SECONDS, (time.thread_time() - started) * IDLE_PARTS)

    def _tick(self, store: Store, ending: threading.Event) -> None:
        mine: dict[int, CallStatus] = {}
        ranks = {user.rank for user in self.users}
        for user in self.users:
            status = user.post(store, again=user.rank in self._suspects)
            if status is not None:
                mine[user.rank] = status
        if not mine:
            self._suspects = {}
            return
        posted = store.add(_POSTED, 0)
        if posted == self._last_count and not self._suspects:
            return
        self._last_count = posted
        found = _collect(store, mine, ranks)
        now = _tangle_of(found, mine)
        before, self._suspects = self._suspects, now
        same = before.keys() == now.keys()
        if now and same and all(before[rank].is_confirmed_by(now[rank]) for rank in now):
            self._report(store, min(mine.keys() & now.keys()), now, ending)

    def _other_statuses(
        self, store: Store, tangle: Mapping[int, CallStatus], ending: threading.Event
    ) -> dict[int, CallStatus | None]:
        """Return the statuses of the other members of the tangle's groups, None for a missing one.

        Waits a moment for them: members that arrived a little later may be about to post.
        """
        members = {rank for one in _groups(tangle) for rank in one} - set(tangle)
        others: dict[int, CallStatus | None] = dict.fromkeys(sorted(members)[:MOST_RANKS])
        deadline = Deadline.after(REST_SECONDS)
        while missing := [rank for rank, one in others.items() if one is None]:
            for user in self.users:
                user.post(store, again=False)
            others.update(_read(store, missing))
            if ending.wait(min(_PAUSE_SECONDS, deadline.remaining())) or deadline.expired:
                break
        return others

    def _report(
        self, store: Store, rank: int, tangle: Mapping[int, CallStatus], ending: threading.Event
    ) -> None:
        groups = sorted({one.call.group for one in tangle.values()})
        # All ranks of the tangle find it, but only one reports it.
        mine = f"tangle seen by {rank}".encode()
        if store.compare_set(f"failure/{groups[0]}", "", mine) != mine:
            return
        message = tangle_message(tangle, self._other_statuses(store, tangle, ending))
        for group in groups:
            publish(store, Abort(group, CollectiveMismatchError.__name__, message))


def _collect(
    store: Store, mine: Mapping[int, CallStatus], known: Collection[int]
) -> dict[int, CallStatus]:
    """Return ``mine`` and the statuses of all blocked ranks that these wait for, even indirectly.

    Of the ``known`` ranks, only those in ``mine`` are blocked.
    """
    found = dict(mine)
    queried = set(known)
    room = MOST_RANKS
    while room and (ahead := {rank for one in _groups(found) for rank in one} - queried):
        ranks = sorted(ahead)[:room]
        room -= len(ranks)
        queried.update(ranks)
        found.update(_read(store, ranks))
    return found


def _groups(statuses: Mapping[int, CallStatus]) -> Collection[Collection[int]]:
    """Return the members of the groups in whose calls ranks are blocked."""
    return {one.call.group: one.ranks for one in statuses.values()}.values()


def _tangle_of(
    found: Mapping[int, CallStatus], mine: Mapping[int, CallStatus]
) -> dict[int, CallStatus]:
    """Return a tangle that contains a rank of ``mine``, among the ranks that it can reach.

    Returns an empty dict if there is none.
    """
    for rank in sorted(mine.keys() & set(find_tangle(found) or ())):
        reach, ahead = {rank}, [rank]
        while ahead:
            new = {other for other in found[ahead.pop()].ranks if other in found} - reach
            reach |= new
            ahead += new
        tangle = find_tangle({other: found[other] for other in sorted(reach)}) or ()
        if rank in tangle:
            return {other: found[other] for other in tangle}
    return {}


def _read(store: Store, ranks: Collection[int]) -> dict[int, CallStatus]:
    """Return the posted statuses of the blocked ranks among ``ranks``, by rank."""
    texts = store.multi_get([status_key(rank) for rank in ranks])
    pairs = zip(ranks, texts, strict=True)
    return {rank: CallStatus.unpack(text) for rank, text in pairs if text}


def status_key(rank: int) -> str:
    """Return the key of the status of ``rank``; it exists from the start, with an empty value."""
    return f"status/{rank}"
