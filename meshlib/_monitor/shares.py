"""The ranks' shares of time, and the ranks that they wait for, computed from samples.

The members of a group reach the end of its calls together. So the member with the shortest time in
calls arrives last, and the others spend their additional time waiting. This needs neither
synchronised clocks nor matching of single calls between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshlib._diagnosis.sampling.sample import Sample

KEPT = 0.6
"""The weight of the old average when a sample is added: averages cover about 2.5 s."""
NAMED = 0.1
"""A straggler's share of time in calls is lower than the others' median by at least this."""


@dataclass(slots=True)
class Rates:
    """The share of time ``inside`` calls on one group, called ``name``, and rates per second."""

    name: str
    inside: float = 0.0
    nbytes: float = 0.0
    calls: float = 0.0


class Smooth:
    """Averages over the last samples of a rank, in which later samples count more."""

    def __init__(self) -> None:
        self.groups: dict[str, Rates] = {}
        """The rates by group id."""
        self.inside: float = 0.0
        """The share of the time inside calls on any group, from 0 to 1."""
        self._weight = 0.0

    def take(self, sample: Sample) -> None:
        """Add the rank's next sample."""
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
    """The groups of one ``name``, such as a mesh dim, over all ranks that use them.

    The shares of time ``inside`` calls and ``waiting`` are means over all ranks of the job. The
    ``bandwidth`` (bytes per second) and ``calls`` (per second) are sums.
    """

    name: str
    inside: float
    waiting: float
    bandwidth: float
    calls: float


@dataclass(frozen=True, slots=True)
class Straggler:
    """A ``rank`` that the others wait for.

    It is outside of calls for the share ``own`` of its time; ``others`` is the other ranks' median.
    """

    rank: int
    own: float
    others: float


def dim_shares(
    ranks: Sequence[tuple[int, Smooth]], silent: Sequence[Smooth] = ()
) -> list[DimShare]:
    """Return the shares of all dims, the dim with the most time in calls first.

    All time in calls on a group with a ``silent`` rank counts as waiting.
    """
    least = {group: 0.0 for smooth in silent for group in smooth.groups}
    for _, smooth in ranks:
        for group, rates in smooth.groups.items():
            least[group] = min(least.get(group, 1.0), rates.inside)
    found: list[DimShare] = []
    for name in {rates.name: None for _, smooth in ranks for rates in smooth.groups.values()}:
        inside = waiting = bandwidth = calls = 0.0
        for _, smooth in ranks:
            for group, rates in smooth.groups.items():
                if rates.name == name:
                    inside += rates.inside
                    waiting += rates.inside - least[group]
                    bandwidth += rates.nbytes
                    calls += rates.calls
        found.append(DimShare(name, inside / len(ranks), waiting / len(ranks), bandwidth, calls))
    return sorted(found, key=lambda dim: -dim.inside)


def stragglers(ranks: Sequence[tuple[int, Smooth]]) -> list[Straggler]:
    """Return the ranks that the others wait for, the slowest first.

    This compares the time outside of all calls. A rank that itself waits for a slow one may keep
    others waiting, but is in calls meanwhile.
    """
    own = {rank: 1.0 - smooth.inside for rank, smooth in ranks}
    found: list[Straggler] = []
    for rank, share in own.items():
        others = sorted(other for name, other in own.items() if name != rank)
        if others and share - (middle := others[len(others) // 2]) >= NAMED:
            found.append(Straggler(rank, share, middle))
    return sorted(found, key=lambda one: -one.own)
