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
    members, ``on`` is its name in messages. ``reached`` has the number of the rank's last
    collective by group id. ``beat`` counts the rank's confirmations of this status.
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
        """Return whether this rank has issued the collective ``sequence`` of ``group``."""
        return self.reached.get(group, 0) >= sequence

    def is_confirmed_by(self, later: CallStatus) -> bool:
        """Return whether the rank is still blocked in the same call according to ``later``."""
        same = (self.place, self.call.header) == (later.place, later.call.header)
        return same and later.beat > self.beat

    def first_difference(self, other: CallStatus) -> int:
        """Return the number of the first call in which the ranks differ on one group, else 0."""
        if self.call.group != other.call.group:
            return 0
        others = {call.sequence: call.header.what for call in other.calls}
        for call in self.calls:
            if call.header.what != others.get(call.sequence, call.header.what):
                return call.sequence
        return 0


def find_tangle(statuses: Mapping[int, CallStatus]) -> list[int] | None:
    """Return ranks that wait for each other in a cycle, or made different calls; else None.

    The time is linear in the number of ranks, unless they are blocked in many different calls.
    """
    return _find_contradiction(list(statuses.values())) or _find_circle(statuses)


def _find_contradiction(statuses: Collection[CallStatus]) -> list[int] | None:
    """Return a rank and the ranks whose calls differ from its calls; None if all agree."""
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
    for call in free:  # grows in the loop
        for rank in here.pop(call):
            for waiting in missed_by[rank]:
                missing[waiting] -= 1
                if missing[waiting] == 0:
                    free.append(waiting)
    return sorted(rank for ranks in here.values() for rank in ranks) or None


def tangle_message(
    tangle: Mapping[int, CallStatus], others: Mapping[int, CallStatus | None]
) -> str:
    """Return a message with a table of the calls in which the ranks of a tangle are blocked.

    ``others`` has the other members of their groups, None for a rank without a status.
    """
    rows: list[tuple[Any, ...]] = []
    statuses = {**others, **tangle}
    known = [one for one in statuses.values() if one is not None]
    differences = [one.first_difference(other) for one in tangle.values() for other in known]
    first = min(filter(None, differences), default=0)
    for rank, one in sorted(statuses.items()):
        if one is None:
            rows.append((str(rank), "not blocked in a call (it computes, or has left)", ""))
        else:
            call = next((call for call in one.calls if call.sequence == first), one.call)
            rows.append((str(rank), f"{call} on {one.on}", call.site))
    return (
        f"ranks {sorted(tangle)} wait for each other in different calls: none can continue\n"
        + table(("rank", "call", "where"), rows)
    )
