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
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from meshlib.failures import publish, table
from meshlib.recorder import COLLECTIVE, FlightRecorder, Record
from transport.deadline import Deadline
from transport.errors import CollectiveMismatchError, DistStoreError
from transport.store.base import Store

TICK_SECONDS = 0.1
STALLED_SECONDS = 0.3
# How many of its last calls a rank posts: where ranks went different ways may lie some calls back.
CALLS_POSTED = 8
# What the rest gets to say where it stands, once a tangle is sure.
REST_SECONDS = 0.2
_PAUSE_SECONDS = 0.05
_POSTED = "standings"
# Beyond this many ranks nobody looks any further; deadlines still name who is missing.
MOST_RANKS = 256


@dataclass(frozen=True)
class Standing:
    """Where a rank has been standing still.

    ``group`` and ``sequence`` tell the collective that it is in, ``ranks`` that group's members,
    ``reached`` the number of its last call in each of its groups, ``beat`` how often it has
    confirmed this. ``calls`` are its last collectives in the group, up to this one, each as
    (sequence, header without history, call, site).
    """

    rank: int
    group: str
    sequence: int
    header: Sequence[int]
    ranks: Sequence[int]
    reached: Mapping[str, int]
    call: str
    site: str
    beat: int = 0
    calls: Sequence[tuple[int, Sequence[int], str, str]] = ()

    def pack(self) -> str:
        """Return the standing as JSON."""
        return json.dumps(self.__dict__)

    @classmethod
    def unpack(cls, data: bytes) -> Standing:
        """Return the standing in ``data``."""
        return cls(**json.loads(data))

    def waits_for(self, other: Standing) -> bool:
        """Whether this rank's call needs ``other``, which has not come to it."""
        return other.rank in self.ranks and other.reached.get(self.group, 0) < self.sequence

    def contradicts(self, other: Standing) -> bool:
        """Whether both have come to a call of one group and it is not the same call."""
        return self.first_difference(other) is not None

    def first_difference(self, other: Standing) -> int | None:
        """Return the number of the first call that both have made in one group differently."""
        if self.group != other.group:
            return None
        theirs = {sequence: list(header) for sequence, header, *_ in other.history()}
        for sequence, header, *_ in self.history():
            if list(header) != theirs.get(sequence, list(header)):
                return sequence
        return None

    def history(self) -> Sequence[tuple[int, Sequence[int], str, str]]:
        """Return the last calls, in order, this one at the end."""
        return self.calls or [(self.sequence, self.header, self.call, self.site)]


def find_tangle(standings: Mapping[int, Standing]) -> list[int] | None:
    """Return ranks that wait for each other in a circle, or contradict each other; else None.

    The cycle is found by removing, again and again, whoever waits for nobody that is left.
    """
    for one in standings.values():
        against = [o.rank for o in standings.values() if one.contradicts(o)]
        if against:
            return sorted([one.rank, *against])
    left = dict(standings)
    while left:
        free = [
            rank
            for rank, one in left.items()
            if not any(one.waits_for(other) for other in left.values() if other is not one)
        ]
        if not free:
            return sorted(left)
        for rank in free:
            del left[rank]
    return None


class Blocked(Protocol):
    """The side of a ProcessGroup that a standing is made from."""

    id: str
    ranks: tuple[int, ...]

    def reached(self) -> int:
        """Return the number of the last collective that was issued."""
        ...


class StallDetector:
    """A rank's thread that posts where the rank stands and looks for tangles."""

    def __init__(
        self,
        rank: int,
        store: Store,
        recorder: FlightRecorder,
        main_thread: int,
        groups: Mapping[str, Blocked],
    ) -> None:
        self._rank = rank
        self._store = store.clone()
        self._recorder = recorder
        self._main_thread = main_thread
        self._groups = groups
        self._posted: Standing | None = None
        self._seen = 0  # of what was posted, when this rank last looked
        self._suspects: dict[int, Standing] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"meshlib-stalls-{rank}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()
        self._store.hang_up()
        self._thread.join(5.0)
        self._store.close()

    def _watch(self) -> None:
        # Without a store there is nobody to compare with; deadlines remain.
        with suppress(DistStoreError):
            while not self._closing.wait(TICK_SECONDS):
                self._tick()

    def _tick(self) -> None:
        record = self._stuck()
        if record is None:
            if self._posted is not None:
                self._store.set(standing_key(self._rank), b"")
                self._posted = None
                self._suspects.clear()
            return
        mine = self._post(record)
        posted = self._store.add(_POSTED, 0)
        if posted == self._seen and not self._suspects:
            return
        self._seen = posted
        found = self._collect(mine)
        tangle = find_tangle(found)
        if tangle is None or self._rank not in tangle:
            self._suspects.clear()
            return
        now = {rank: found[rank] for rank in tangle}
        before, self._suspects = self._suspects, now
        if before.keys() == now.keys() and all(_confirmed(before[r], now[r]) for r in tangle):
            self._report(now)

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

    def _post(self, record: Record) -> Standing:
        """Return where this rank stands, which is in the store if it is new or somebody asks."""
        group = self._groups[record.group]
        before = self._posted
        if before is not None and (before.group, before.sequence) != (
            record.group,
            record.header.sequence,
        ):
            before = None
        if before is not None and not self._suspects:
            return before
        standing = Standing(
            rank=self._rank,
            group=record.group,
            sequence=record.header.sequence,
            header=list(record.header),
            ranks=list(group.ranks),
            reached={g.id: g.reached() for g in list(self._groups.values())},
            call=f"{record.header} on {group}",
            site=record.site,
            beat=0 if before is None else before.beat + 1,
            calls=[
                (r.header.sequence, list(r.header.what), f"{r.header} on {group}", r.site)
                for r in self._recorder.records(record.group)
                if r.peer == COLLECTIVE
                and 0 <= record.header.sequence - r.header.sequence < CALLS_POSTED
            ],
        )
        self._store.set(standing_key(self._rank), standing.pack())
        self._posted = standing
        if before is None:
            self._store.add(_POSTED, 1)  # only now: who sees this sees the standing
        return standing

    def _collect(self, mine: Standing) -> dict[int, Standing]:
        """Return the standings of all ranks that this one waits for, directly or not."""
        found = {self._rank: mine}
        asked = {self._rank}
        while ahead := {rank for one in found.values() for rank in one.ranks} - asked:
            ranks = sorted(ahead)[: MOST_RANKS - len(asked)]
            if not ranks:
                break
            asked.update(ranks)
            found.update(self._read(ranks))
        return found

    def _read(self, ranks: Sequence[int]) -> dict[int, Standing]:
        """Return where those of ``ranks`` stand that have said so."""
        texts = self._store.multi_get([standing_key(rank) for rank in ranks])
        pairs = zip(ranks, texts, strict=True)
        return {rank: Standing.unpack(text) for rank, text in pairs if text}

    def _standings_beside(self, tangle: Mapping[int, Standing]) -> dict[int, Standing | None]:
        """Return where the other members of the tangle's groups stand, for those who say so soon.

        They may have come a little later than the tangle's ranks, and so be about to post.
        """
        members = {rank for one in tangle.values() for rank in one.ranks} - set(tangle)
        beside: dict[int, Standing | None] = dict.fromkeys(sorted(members)[:MOST_RANKS])
        deadline = Deadline.after(REST_SECONDS)
        while missing := [rank for rank, one in beside.items() if one is None]:
            beside.update(self._read(missing))
            if self._closing.wait(min(_PAUSE_SECONDS, deadline.remaining())) or deadline.expired:
                break
        return beside

    def _report(self, tangle: Mapping[int, Standing]) -> None:
        groups = sorted({one.group for one in tangle.values()})
        # All ranks of the tangle find it; one of them tells.
        mine = f"tangle seen by {self._rank}".encode()
        if self._store.compare_set(f"failure/{groups[0]}", "", mine) != mine:
            return
        message = tangle_message(tangle, self._standings_beside(tangle))
        for group in groups:
            publish(
                self._store,
                {
                    "kind": "abort",
                    "group": group,
                    "error": CollectiveMismatchError.__name__,
                    "message": message,
                    "from": self._rank,
                },
            )


def tangle_message(tangle: Mapping[int, Standing], beside: Mapping[int, Standing | None]) -> str:
    """Return the table of what each rank of a tangle waits in, and where those ``beside`` it stand
    (None: nobody knows).
    """
    rows: list[tuple[Any, ...]] = []
    everybody = {**beside, **tangle}
    known = [one for one in everybody.values() if one is not None]
    differences = [one.first_difference(other) for one in tangle.values() for other in known]
    first = min((number for number in differences if number is not None), default=0)
    for rank, one in sorted(everybody.items()):
        if one is None:
            rows.append((str(rank), "in no call for as long (it computes, or has left)", ""))
        else:
            here = one.call, one.site
            calls = (tuple(rest) for number, _, *rest in one.history() if number == first)
            rows.append((str(rank), *next(calls, here)))
    return (
        f"ranks {sorted(tangle)} wait for each other in different calls: none of them can go on\n"
        + table(("rank", "call", "where"), rows)
    )


def _confirmed(before: Standing, now: Standing) -> bool:
    """Whether a rank has looked again meanwhile and still stands at the same place."""
    place = (now.group, now.sequence, list(now.header))
    return (before.group, before.sequence, list(before.header)) == place and now.beat > before.beat


def standing_key(rank: int) -> str:
    """Return where ``rank`` posts where it stands; it is there from the start, and empty."""
    return f"standing/{rank}"
