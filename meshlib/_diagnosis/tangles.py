"""The calls in which ranks are blocked, and the cycles of ranks that wait for each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshlib._calls.failures.messages import table
from meshlib._recording.call_report import CallReport
from meshlib._records import JsonRecord
from transport._calls.header import CallHeader


@dataclass(frozen=True, slots=True)
class CallStatus(JsonRecord):
    """The collective in which ``rank`` is blocked, the last of ``calls``.

    ``calls`` are the rank's last collectives on one group, in order. ``ranks`` are the group's
    members, ``on`` is its name in messages.

    ``reached`` has the number of the rank's last collective by group id. ``beat`` counts how often
    the rank has confirmed the status.
    """

    rank: int
    ranks: Sequence[int]
    on: str
    reached: Mapping[str, int]
    calls: Sequence[CallReport]
    beat: int = 0

    @property
    def call(self) -> CallReport:
        """The collective in which the rank is blocked."""
        return self.calls[-1]

    @property
    def place(self) -> tuple[str, int]:
        """The group's id, and the number of the collective in it."""
        return self.call.group, self.call.sequence

    def has_arrived(self, group: str, sequence: int) -> bool:
        """True if this rank has issued the collective ``sequence`` of ``group``."""
        return self.reached.get(group, 0) >= sequence

    def is_confirmed_by(self, later: CallStatus) -> bool:
        """True if ``later`` says that the rank is still blocked in the same call."""
        same = (self.place, self.call.header) == (later.place, later.call.header)
        return same and later.beat > self.beat

    def first_difference(self, other: CallStatus) -> int:
        """Return the number of the first call that both ranks made in one group differently.

        0 if they made none.
        """
        if self.call.group != other.call.group:
            return 0
        theirs = {call.sequence: call.header.what for call in other.calls}
        for call in self.calls:
            if call.header.what != theirs.get(call.sequence, call.header.what):
                return call.sequence
        return 0


def find_tangle(statuses: Mapping[int, CallStatus]) -> list[int] | None:
    """Return ranks that wait for each other in a circle, or made different calls; else None.

    Takes time linear in the ranks, unless many different calls are waited in.
    """
    return _find_contradiction(list(statuses.values())) or _find_circle(statuses)


def _find_contradiction(statuses: Collection[CallStatus]) -> list[int] | None:
    """Return a rank and those that have made another call than it has."""
    seen: dict[tuple[str, int], CallHeader] = {}
    for one in statuses:
        for call in one.calls:
            made = call.header.what
            if seen.setdefault((call.group, call.sequence), made) != made:
                among = [other for other in statuses if other.call.group == call.group]
                return next(_contradictions(among))
    return None


def _contradictions(among: Sequence[CallStatus]) -> Iterator[list[int]]:
    for one in among:
        against = [other.rank for other in among if one.first_difference(other)]
        if against:
            yield sorted([one.rank, *against])


def _find_circle(statuses: Mapping[int, CallStatus]) -> list[int] | None:
    """Return the ranks that remain when calls that wait for no remaining rank are removed.

    Ranks that are blocked in one call wait for the same ranks, so whole calls are removed.
    """
    here: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, one in statuses.items():
        here[one.place].append(rank)
    missed_by: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    missing: dict[tuple[str, int], int] = {}
    for call, ranks in here.items():
        members = statuses[ranks[0]].ranks
        late = [r for r in members if r in statuses and not statuses[r].has_arrived(*call)]
        missing[call] = len(late)
        for rank in late:
            missed_by[rank].append(call)
    free = [call for call, count in missing.items() if count == 0]
    for call in free:  # to which others are added meanwhile
        for rank in here.pop(call):
            for waiting in missed_by[rank]:
                missing[waiting] -= 1
                if missing[waiting] == 0:
                    free.append(waiting)
    return sorted(rank for ranks in here.values() for rank in ranks) or None


def tangle_message(
    tangle: Mapping[int, CallStatus], beside: Mapping[int, CallStatus | None]
) -> str:
    """Return the table of the calls in which the ranks of a tangle are blocked.

    ``beside`` has the other members of their groups, None for a rank without a status.
    """
    rows: list[tuple[Any, ...]] = []
    everybody = {**beside, **tangle}
    known = [one for one in everybody.values() if one is not None]
    differences = [one.first_difference(other) for one in tangle.values() for other in known]
    first = min(filter(None, differences), default=0)
    for rank, one in sorted(everybody.items()):
        if one is None:
            rows.append((str(rank), "in no call for as long (it computes, or has left)", ""))
        else:
            call = next((call for call in one.calls if call.sequence == first), one.call)
            rows.append((str(rank), f"{call} on {one.on}", call.site))
    return (
        f"ranks {sorted(tangle)} wait for each other in different calls: none of them can go on\n"
        + table(("rank", "call", "where"), rows)
    )
