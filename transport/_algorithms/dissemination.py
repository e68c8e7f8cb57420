"""The dissemination barrier: in step k every rank tells rank + 2^k what it has heard so far.

After Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988):
ceil(log2 n) empty frames a rank, for any n.
"""

from __future__ import annotations

from transport._algorithms.team import Team
from transport._call import Call
from transport._link import exchange


def barrier(team: Team, call: Call) -> None:
    """Return when every member has called."""
    nothing = memoryview(bytearray())
    distance = 1
    while distance < team.size:
        onward = team.link((team.rank + distance) % team.size, call)
        behind = team.link((team.rank - distance) % team.size, call)
        exchange(call, onward, nothing, behind, nothing)
        distance *= 2
