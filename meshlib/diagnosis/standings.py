"""Where ranks stand, and which of them wait for each other in a circle."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshlib.calls.failures.messages import table
from meshlib.calls.members import even


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
        found = even(self.ranks)
        ranks = self.ranks if found is None else {"range": (found.start, found.stop, found.step)}
        return json.dumps({**self.__dict__, "ranks": ranks})

    @classmethod
    def unpack(cls, data: bytes) -> Standing:
        """Return the standing in ``data``."""
        fields = json.loads(data)
        if isinstance(fields["ranks"], dict):
            fields["ranks"] = range(*fields["ranks"]["range"])
        return cls(**fields)

    def has_come(self, group: str, sequence: int) -> bool:
        """Whether this rank has issued the collective ``sequence`` of ``group``."""
        return self.reached.get(group, 0) >= sequence

    def first_difference(self, other: Standing) -> int:
        """Return the number of the first call that both have made in one group differently, or 0:
        they have made none.
        """
        if self.group != other.group:
            return 0
        theirs = {sequence: list(header) for sequence, header, *_ in other.history()}
        for sequence, header, *_ in self.history():
            if list(header) != theirs.get(sequence, list(header)):
                return sequence
        return 0

    def history(self) -> Sequence[tuple[int, Sequence[int], str, str]]:
        """Return the last calls, in order, this one at the end."""
        return self.calls or [(self.sequence, self.header, self.call, self.site)]


def find_tangle(standings: Mapping[int, Standing]) -> list[int] | None:
    """Return ranks that wait for each other in a circle, or contradict each other; else None.

    Takes time linear in the ranks, unless many different calls are waited in.
    """
    return _find_contradiction(list(standings.values())) or _find_circle(standings)


def _find_contradiction(standings: Collection[Standing]) -> list[int] | None:
    """Return a rank and those that have made another call than it has."""
    seen: dict[tuple[str, int], tuple[int, ...]] = {}
    for one in standings:
        for sequence, header, *_ in one.history():
            made = tuple(header)
            if seen.setdefault((one.group, sequence), made) != made:
                among = [other for other in standings if other.group == one.group]
                return next(_contradictions(among))
    return None


def _contradictions(among: Sequence[Standing]) -> Iterator[list[int]]:
    for one in among:
        against = [other.rank for other in among if one.first_difference(other)]
        if against:
            yield sorted([one.rank, *against])


def _find_circle(standings: Mapping[int, Standing]) -> list[int] | None:
    """Return what is left when whoever waits for nobody that is left is removed, again and again.

    Those who stand in one call wait for the same ranks, so calls are what is removed.
    """
    here: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, one in standings.items():
        here[one.group, one.sequence].append(rank)
    missed_by: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    missing: dict[tuple[str, int], int] = {}
    for call, ranks in here.items():
        members = standings[ranks[0]].ranks
        late = [r for r in members if r in standings and not standings[r].has_come(*call)]
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


def tangle_message(tangle: Mapping[int, Standing], beside: Mapping[int, Standing | None]) -> str:
    """Return the table of what each rank of a tangle waits in, and where those ``beside`` it stand
    (None: nobody knows).
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
            here = one.call, one.site
            calls = (tuple(rest) for number, _, *rest in one.history() if number == first)
            rows.append((str(rank), *next(calls, here)))
    return (
        f"ranks {sorted(tangle)} wait for each other in different calls: none of them can go on\n"
        + table(("rank", "call", "where"), rows)
    )
