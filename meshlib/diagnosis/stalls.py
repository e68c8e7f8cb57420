"""Finding ranks that wait for each other in different calls, long before a deadline passes.

Most mismatches show in the first frame that arrives (``transport.call``). Some exchange no frame at
all: two ranks in calls of two different groups of the same members, say, or in one group's calls
in another order. Each waits for a call that the other will never make.

Each rank whose main thread has been in one call for a while posts where it stands. A rank *waits
for* another one that has not reached its call yet. A cycle of ranks that wait for each other, all
of them standing still, cannot resolve itself: that is a mismatch, and the ranks in it are told.
A rank that merely computes has posted nothing, so slow is never taken for stuck.

Waiting must cost next to nothing, however many ranks wait for a slow one: a rank posts when it has
come to a standstill, and reads what others have posted only when a counter says that there is more.
Ranks that are threads of one process share one thread that looks, and what it has seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from meshlib.calls.members import Members
from meshlib.diagnosis.attendant import Attendant
from meshlib.diagnosis.standings import Standing, find_tangle, tangle_message
from meshlib.events.events import Abort
from meshlib.events.log import publish
from meshlib.recording.recorder import COLLECTIVE, FlightRecorder, Record
from transport.deadline import Deadline
from transport.errors import CollectiveMismatchError
from transport.store.base import Store

TICK_SECONDS = 0.1
STALLED_SECONDS = 0.3
# Who looks takes at most one part in so many of a core.
IDLE_PARTS = 10
# How many of its last calls a rank posts: where ranks went different ways may lie some calls back.
CALLS_POSTED = 8
# What the rest gets to say where it stands, once a tangle is sure.
REST_SECONDS = 0.2
_PAUSE_SECONDS = 0.05
_POSTED = "standings"
# Nobody reads more standings than these; deadlines still name who is missing.
MOST_RANKS = 256


class StallDetector:
    """One rank, whose main thread is looked at, from its making until it is closed.

    ``groups()`` gives the members of its groups, and the number of the last collective of each.
    """

    def __init__(
        self,
        rank: int,
        store: Store,
        recorder: FlightRecorder,
        main_thread: int,
        groups: Callable[[], list[tuple[Members, int]]],
    ) -> None:
        self.rank = rank
        self._recorder = recorder
        self._main_thread = main_thread
        self._groups = groups
        self.posted: Standing | None = None
        self._lookout = _Lookout.of(store)
        self._lookout.enter(self, store)

    def close(self) -> None:
        """Stop looking."""
        self._lookout.leave(self)

    def look(self, store: Store, *, again: bool) -> Standing | None:
        """Return where this rank stands still, which is in ``store`` if it is new, or ``again``."""
        record = self._stuck()
        if record is None:
            if self.posted is not None:
                store.set(standing_key(self.rank), b"")
                self.posted = None
            return None
        before, place = self.posted, (record.group, record.header.sequence)
        if before is not None and (before.group, before.sequence) != place:
            before = None
        if before is None or again:
            standing = self._standing(record, 0 if before is None else before.beat + 1)
            if standing is None:
                return None
            self.posted = standing
            store.set(standing_key(self.rank), self.posted.pack())
        if before is None:
            store.add(_POSTED, 1)  # only now: who sees this sees the standing
        return self.posted

    def _stuck(self) -> Record | None:
        """Return the collective that this rank's main thread has been stuck in, if it is."""
        open_calls = [r for r in self._recorder.records() if not r.ended]
        blocking = [r for r in open_calls if r.sync]
        if len(blocking) != 1 or blocking[0].thread != self._main_thread:
            return None  # it computes; or other threads of it may still make the missing call
        last = blocking[0]
        if last.peer != COLLECTIVE or time.monotonic() - last.issued < STALLED_SECONDS:
            return None
        # Calls of one group run in order: the first that has not ended is the one that waits.
        return next(r for r in open_calls if r.group == last.group and r.peer == COLLECTIVE)

    def _standing(self, record: Record, beat: int) -> Standing | None:
        """Return what to post of a call; None if it has ended meanwhile, and its group as well."""
        groups = self._groups()
        group = next((members for members, _ in groups if members.id == record.group), None)
        if group is None:
            return None
        return Standing(
            rank=self.rank,
            group=record.group,
            sequence=record.header.sequence,
            header=list(record.header),
            ranks=group.ranks,
            reached={members.id: number for members, number in groups},
            call=f"{record.header} on {group}",
            site=record.site,
            beat=beat,
            calls=[
                (r.header.sequence, list(r.header.what), f"{r.header} on {group}", r.site)
                for r in self._recorder.records(record.group)
                if r.peer == COLLECTIVE
                and 0 <= record.header.sequence - r.header.sequence < CALLS_POSTED
            ],
        )


class _Lookout(Attendant[StallDetector]):
    """Has ranks look where they stand, and looks for tangles among all that do."""

    name = "stalls"

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0  # of what was posted, when this one last looked
        self._suspects: dict[int, Standing] = {}

    def work(self, store: Store, ending: threading.Event) -> None:
        pause = TICK_SECONDS
        while not ending.wait(pause):
            started = time.thread_time()
            self._tick(store, ending)
            pause = max(TICK_SECONDS, (time.thread_time() - started) * IDLE_PARTS)

    def _tick(self, store: Store, ending: threading.Event) -> None:
        mine: dict[int, Standing] = {}
        ranks = {user.rank for user in self.users}
        for user in self.users:
            standing = user.look(store, again=user.rank in self._suspects)
            if standing is not None:
                mine[user.rank] = standing
        if not mine:
            self._suspects = {}
            return
        posted = store.add(_POSTED, 0)
        if posted == self._seen and not self._suspects:
            return
        self._seen = posted
        found = _collect(store, mine, ranks)
        now = _tangle_of(found, mine)
        before, self._suspects = self._suspects, now
        if now and before.keys() == now.keys() and all(_confirmed(before[r], now[r]) for r in now):
            self._report(store, min(mine.keys() & now.keys()), now, ending)

    def _standings_beside(
        self, store: Store, tangle: Mapping[int, Standing], ending: threading.Event
    ) -> dict[int, Standing | None]:
        """Return where the other members of the tangle's groups stand, for those who say so soon.

        They may have come a little later than the tangle's ranks, and so be about to post.
        """
        members = {rank for one in _groups(tangle) for rank in one} - set(tangle)
        beside: dict[int, Standing | None] = dict.fromkeys(sorted(members)[:MOST_RANKS])
        deadline = Deadline.after(REST_SECONDS)
        while missing := [rank for rank, one in beside.items() if one is None]:
            for user in self.users:
                user.look(store, again=False)
            beside.update(_read(store, missing))
            if ending.wait(min(_PAUSE_SECONDS, deadline.remaining())) or deadline.expired:
                break
        return beside

    def _report(
        self, store: Store, rank: int, tangle: Mapping[int, Standing], ending: threading.Event
    ) -> None:
        groups = sorted({one.group for one in tangle.values()})
        # All ranks of the tangle find it; one of them tells.
        mine = f"tangle seen by {rank}".encode()
        if store.compare_set(f"failure/{groups[0]}", "", mine) != mine:
            return
        message = tangle_message(tangle, self._standings_beside(store, tangle, ending))
        for group in groups:
            publish(store, Abort(group, CollectiveMismatchError.__name__, message))


def _collect(
    store: Store, mine: Mapping[int, Standing], known: Collection[int]
) -> dict[int, Standing]:
    """Return ``mine`` and where all ranks stand that those wait for, directly or not.

    Of the ``known`` ranks no others stand still.
    """
    found = dict(mine)
    asked = set(known)
    room = MOST_RANKS
    while room and (ahead := {rank for one in _groups(found) for rank in one} - asked):
        ranks = sorted(ahead)[:room]
        room -= len(ranks)
        asked.update(ranks)
        found.update(_read(store, ranks))
    return found


def _groups(standings: Mapping[int, Standing]) -> Collection[Collection[int]]:
    """Return the members of the groups that somebody waits in."""
    return {one.group: one.ranks for one in standings.values()}.values()


def _tangle_of(found: Mapping[int, Standing], mine: Mapping[int, Standing]) -> dict[int, Standing]:
    """Return a tangle that one of ``mine`` is in, as that rank sees it; empty if there is none."""
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


def _read(store: Store, ranks: Collection[int]) -> dict[int, Standing]:
    """Return where those of ``ranks`` stand that have said so."""
    texts = store.multi_get([standing_key(rank) for rank in ranks])
    pairs = zip(ranks, texts, strict=True)
    return {rank: Standing.unpack(text) for rank, text in pairs if text}


def _confirmed(before: Standing, now: Standing) -> bool:
    """Whether a rank has looked again meanwhile and still stands at the same place."""
    place = (now.group, now.sequence, list(now.header))
    return (before.group, before.sequence, list(before.header)) == place and now.beat > before.beat


def standing_key(rank: int) -> str:
    """Return where ``rank`` posts where it stands; it is there from the start, and empty."""
    return f"standing/{rank}"
