"""How far ahead of what it has received a group sends: as its farthest link needs.

On a link to a far peer, as many bytes must be under way as the wire takes in a round trip, or it is
idle in between. Frames have no names, so all members must send in the same order: they agree on the
largest window of any link, at the first call that may send ahead.
"""

from __future__ import annotations

import numpy as np

from transport.algorithms import bruck
from transport.algorithms.team import Team
from transport.call import Call
from transport.choosing.choice import Algorithm
from transport.choosing.peers import peers_of
from transport.link import Link, QueuedLink


def is_far(link: Link) -> bool:
    """Return whether frames should leave on ``link`` before what they wait for has come."""
    return isinstance(link, QueuedLink) and link.window > 0


def agree(team: Team, call: Call) -> int:
    """Return how many bytes the members are to have under way on each link: 0 where none is far.

    Every member calls, once, in the same collective. Opens links.
    """
    team.overlap.await_former()
    near = team.size <= team.table.pairwise_ranks
    peers = peers_of(Algorithm.PAIRWISE if near else Algorithm.BRUCK, team.rank, team.size)
    if not isinstance(team.link(peers[0], call), QueuedLink):
        return 0  # so it is on all members: they have links of one kind
    links = [team.link(peer, call) for peer in peers]
    found = np.zeros((team.size, 1), np.int64)
    found[team.rank] = max(link.window for link in links if isinstance(link, QueuedLink))
    bruck.all_gather(team, call, list(found))
    return int(found.max())
