"""How ranks spend their time, and whom they wait for: computed from their samples alone.

The members of a group come to the end of its calls together, so the one that is in them for the
shortest time is the one that comes last: what the others spend in them beyond that is waiting. No
clocks are compared, and no single call has to be found on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshlib.diagnosis.sampling.sample import Sample

KEPT = 0.6
"""How much of an average over samples the next one leaves of it: they are about 2.5 s deep."""
NAMED = 0.1
"""Who is in calls for so much less of the time than half of the others keeps them waiting."""


@dataclass(slots=True)
class Rates:
    """On one group, called ``name``: the share of the time ``inside`` calls, and rates a second."""

    name: str
    inside: float = 0.0
    nbytes: float = 0.0
    calls: float = 0.0


class Smooth:
    """Averages over the last samples of a rank, the later ones counting more."""

    def __init__(self) -> None:
        self.groups: dict[str, Rates] = {}
        """By a group's id."""
        self.inside: float = 0.0
        """The share of the time inside of calls on whatever group, from 0 to 1."""
        self._weight = 0.0

    def take(self, sample: Sample) -> None:
        """Note the rank's next sample."""
        kept = KEPT * self._weight
        self._weight = kept + 1.0 - KEPT
        old, new = kept / self._weight, (1.0 - KEPT) / self._weight
        self.inside = old * self.inside + new * min(1.0, sample.inside / sample.seconds)
        for rates in self.groups.values():
            rates.inside *= old
            rates.nbytes *= old
            rates.calls *= old
        for one in sample.traffic:
            rates = self.groups.setdefault(one.group, Rates(one.name))
            rates.name = one.name
            rates.inside += new * min(1.0, one.seconds / sample.seconds)
            rates.nbytes += new * one.nbytes / sample.seconds
            rates.calls += new * one.calls / sample.seconds
        for group, rates in list(self.groups.items()):
            if rates.inside < 1e-4 and rates.calls < 0.02:
                del self.groups[group]


@dataclass(frozen=True, slots=True)
class DimShare:
    """A mesh dim, or what else groups are ``name``d for, over all ranks that use it.

    ``inside`` is the share of the time in its calls and ``waiting`` that of waiting in them, means
    over all ranks of the job; ``bandwidth`` is in bytes a second and ``calls`` a second, sums over
    them. ``by_rank`` has the share of waiting of each rank.
    """

    name: str
    inside: float
    waiting: float
    bandwidth: float
    calls: float
    by_rank: dict[int, float]


@dataclass(frozen=True, slots=True)
class Straggler:
    """``rank`` is outside of calls for ``own`` of the time, half of the others for at most
    ``others``.
    """

    rank: int
    own: float
    others: float


def dim_shares(
    ranks: Sequence[tuple[int, Smooth]], silent: Sequence[Smooth] = ()
) -> list[DimShare]:
    """Return what the job does on each dim, where it is longest in calls first.

    Whoever is in a call with a rank that is ``silent`` does nothing but wait for it.
    """
    least = {group: 0.0 for smooth in silent for group in smooth.groups}
    for _, smooth in ranks:
        for group, rates in smooth.groups.items():
            least[group] = min(least.get(group, 1.0), rates.inside)
    found: dict[str, DimShare] = {}
    for name in {rates.name: None for _, smooth in ranks for rates in smooth.groups.values()}:
        inside = bandwidth = calls = 0.0
        by_rank: dict[int, float] = {}
        for rank, smooth in ranks:
            for group, rates in smooth.groups.items():
                if rates.name == name:
                    inside += rates.inside
                    bandwidth += rates.nbytes
                    calls += rates.calls
                    waited = rates.inside - least[group]
                    by_rank[rank] = by_rank.get(rank, 0.0) + waited
        waiting = sum(by_rank.values()) / len(ranks)
        found[name] = DimShare(name, inside / len(ranks), waiting, bandwidth, calls, by_rank)
    return sorted(found.values(), key=lambda dim: -dim.inside)


def stragglers(ranks: Sequence[tuple[int, Smooth]]) -> list[Straggler]:
    """Return the ranks that the others wait for, the slowest first.

    A rank that waits for a slow one keeps others waiting as well, but is in calls meanwhile. So
    what is compared is how long ranks are in no call at all.
    """
    own = {rank: 1.0 - smooth.inside for rank, smooth in ranks}
    found: list[Straggler] = []
    for rank, share in own.items():
        others = sorted(other for name, other in own.items() if name != rank)
        if others and share - (middle := others[len(others) // 2]) >= NAMED:
            found.append(Straggler(rank, share, middle))
    return sorted(found, key=lambda one: -one.own)
