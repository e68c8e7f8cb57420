"""Rings: n - 1 steps, each to the next rank and from the one before; every byte travels least.

For copies alone: a sum that went round would add its numbers in the order of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.team import Team
from transport.call import Call
from transport.operands.flat import as_bytes
from transport.operands.reduce_op import Flat


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Pass ``outputs[rank]``, which is in place already, round to all. Sizes may differ."""
    rank, size = team.rank, team.size
    onward, behind = team.link((rank + 1) % size, call), team.link((rank - 1) % size, call)
    for step in range(size - 1):
        sent, arriving = outputs[(rank - step) % size], outputs[(rank - step - 1) % size]
        onward.exchange(call, as_bytes(sent), behind, as_bytes(arriving))
