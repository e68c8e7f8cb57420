"""How far ahead of what it has received a group sends: agreed upon, from what its links are like.

On a link with delay, as many bytes must be under way as the wire takes in a round trip, or it is
idle in between. Each member knows what its own links are like; since frames have no names, all must
send in the same order, and so they agree on the largest figure that any of them has. That is done
at the first large collective, and again now and then, as links become better known. Where the
kernel's windows turn out to be what holds a link back, it is given more connections.
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
_MOST_CONNECTIONS = 16
# A link that waits for room in the kernel's memory for a share of the time gets twice as many
# connections, but only where it moves some part of that memory in a round trip. Where it moves
# less, there is room that it doesn't use: who is waited for is a slow reader, or all share a slower
# wire, and more connections would only cost more.
_HELD_BACK = 0.25
_USED = 0.25


def wanted(pace: Pace, segment: int) -> int:
    """Return how many bytes should be under way on a link of this pace: at least a ``segment``
    where any should.
    """
    found = min(int(_MARGIN * pace.round_trip * max(pace.rate, _LEAST_RATE)), LIMIT)
    return max(found, segment) if pace.round_trip >= _WORTH_IT else found


def is_held_back(pace: Pace, connections: int) -> bool:
    """Return whether a link of this pace needs more than ``connections``, which it has."""
    if pace.connections < connections or pace.held_back < _HELD_BACK:
        return False
    return pace.rate * pace.round_trip >= _USED * pace.room * pace.connections


def is_far(link: Link, segment: int) -> bool:
    """Return whether ``segment`` bytes or more should be under way on ``link``."""
    return isinstance(link, PacedLink) and wanted(link.pace(), segment) >= segment


class Ahead:
    """What the members of one group have agreed on. One thread at a time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.connections = 1
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
        paced = [link for link in links if isinstance(link, PacedLink)]
        paces = [link.pace() for link in paced]
        found = np.zeros((team.size, 2), np.int64)
        found[team.rank] = (
            max(wanted(pace, team.table.segment) for pace in paces),
            any(is_held_back(pace, self.connections) for pace in paces),
        )
        bruck.all_gather(team, call, list(found))
        self.nbytes = int(found[:, 0].max())
        if found[:, 1].any():
            self.connections = min(2 * self.connections, _MOST_CONNECTIONS)
        if self.connections > 1:
            for link in paced:
                link.widen(self.connections)
