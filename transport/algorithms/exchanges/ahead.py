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
from transport.choosing.choice import Algorithm
from transport.choosing.peers import peers_of
from transport.link import Link, Pace, PacedLink

LIMIT = 64 << 20
"""The most bytes that are under way on a link."""

# What a link is taken for at first: 8 Gb/s, of which twice as much may be on its way, so that ranks
# which do not start at the same moment find enough. Too much costs no more than socket buffers.
_LEAST_RATE = 5e8
_MARGIN = 2.0
# From this round trip on (seconds) a rank that waits in each lap loses more than what is sent ahead
# costs, even if little fits into the wire; between namespaces that share caches it costs a fifth.
_WORTH_IT = 1e-4
_LONGEST_PAUSE = 64


def wanted(pace: Pace, segment: int) -> int:
    """Return how many bytes should be under way on a link of this pace: at least a ``segment``
    where any should.
    """
    found = min(int(_MARGIN * pace.round_trip * max(pace.rate, _LEAST_RATE)), LIMIT)
    return max(found, segment) if pace.round_trip >= _WORTH_IT else found


def is_far(link: Link, segment: int) -> bool:
    """Return whether ``segment`` bytes or more should be under way on ``link``."""
    return isinstance(link, PacedLink) and wanted(link.pace(), segment) >= segment


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
            team.overlap.await_former()
            self._next += min(self._calls + 1, _LONGEST_PAUSE)
            self._ask(team, call)
        self._calls += 1
        return self.nbytes

    def _ask(self, team: Team, call: Call) -> None:
        near = team.size <= team.table.pairwise_ranks
        peers = peers_of(Algorithm.PAIRWISE if near else Algorithm.BRUCK, team.rank, team.size)
        if not isinstance(team.link(peers[0], call), PacedLink):
            return  # so it is on all members: they have links of one kind
        links = [team.link(peer, call) for peer in peers]
        paces = [link.pace() for link in links if isinstance(link, PacedLink)]
        found = np.zeros((team.size, 1), np.int64)
        found[team.rank] = max(wanted(pace, team.table.segment) for pace in paces)
        bruck.all_gather(team, call, list(found))
        self.nbytes = int(found.max())
