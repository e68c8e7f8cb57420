"""Bruck's all-gather: log2(n) steps that double what each rank holds, for any n.

After Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997). Blocks are packed into scratch memory, in the order of the ranks
from this one on, so that each step sends and receives one contiguous frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from transport._algorithms.team import Team
from transport._call import Call
from transport._link import exchange
from transport._operands.flat import as_bytes
from transport._operands.operand import TOTAL
from transport._operands.reduce_op import Flat


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Pass ``outputs[rank]``, which is in place already, to all. Sizes may differ."""
    rank, size = team.rank, team.size
    members = [(rank + i) % size for i in range(size)]
    ends = [0, *accumulate(outputs[member].size for member in members)]
    packed = team.scratch.flat(TOTAL, outputs[rank].dtype, ends[-1])
    packed[: ends[1]] = outputs[rank]
    distance = 1
    while distance < size:
        blocks = min(distance, size - distance)
        exchange(
            call,
            team.link((rank - distance) % size, call),
            as_bytes(packed[: ends[blocks]]),
            team.link((rank + distance) % size, call),
            as_bytes(packed[ends[distance] : ends[distance + blocks]]),
        )
        distance *= 2
    for i in range(1, size):
        outputs[members[i]][:] = packed[ends[i] : ends[i + 1]]
