"""How far ahead of what it has received a group sends: agreed upon, from what its links are like.

On a link with delay, as many bytes must be under way as the wire takes in a round trip, or it is
idle in between. Each member knows what its own links are like; since frames have no names, all must
send in the same order, and so they agree on the largest figure that any of them has. That is done
at the first large collective, and again now and then, as links become better known.
"""

from __future__ import annotations

import numpy as np

from transport.algorithms import bruck
from transport.algorithms.team import Team
from transport.call import Call
from transport.link import Link, Pace, PacedLink

LIMIT = 64 << 20
"""The most bytes that are under way on a link."""

# What a link is taken for at first: 8 Gb/s, of which twice as much may be on its way, so that ranks
# which do not start at the same moment find enough. Too much costs no more than socket buffers.
_LEAST_RATE = 5e8
_MARGIN = 2.0
_LONGEST_PAUSE = 64


def wanted(pace: Pace) -> int:
    """Return how many bytes should be under way on a link of this pace."""
    return min(int(_MARGIN * pace.round_trip * max(pace.rate, _LEAST_RATE)), LIMIT)


def is_far(link: Link, segment: int) -> bool:
    """Return whether more than ``segment`` bytes should be under way on ``link``."""
    return isinstance(link, PacedLink) and wanted(link.pace()) >= segment


class Ahead:
    """What the members of one group have agreed on. One thread at a time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._calls = 0
        self._next = 0

    def agree(self, team: Team, call: Call) -> int:
        """Return the bytes that are to be under way on each link: 0 where there is no delay.

        Every member calls, in the same collectives. The first calls, and some later ones, exchange
        a small frame with a few members. Opens links.
        """
        if self._calls == self._next:
            self._next += min(self._calls + 1, _LONGEST_PAUSE)
            self.nbytes = self._largest(team, call)
        self._calls += 1
        return self.nbytes

    @staticmethod
    def _largest(team: Team, call: Call) -> int:
        links = [team.link(peer, call) for peer in _peers(team)]
        paces = [link.pace() for link in links if isinstance(link, PacedLink)]
        if len(paces) < len(links):
            return 0  # so it is on all members: they have links of one kind
        found = np.zeros(team.size, np.int64)
        found[team.rank] = max(wanted(pace) for pace in paces)
        bruck.all_gather(team, call, [found[i : i + 1] for i in range(team.size)])
        return int(found.max())


def _peers(team: Team) -> list[int]:
    """Return whom a large collective of this group sends to: all, or in large ones a few."""
    rank, size = team.rank, team.size
    if size <= team.table.pairwise_ranks:
        return [(rank + step) % size for step in range(1, size)]
    distances = [1 << level for level in range((size - 1).bit_length())]
    return sorted({(rank + d) % size for d in distances} | {(rank - d) % size for d in distances})
