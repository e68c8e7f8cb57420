"""Rings: n - 1 steps, each to the next rank and from the one before; every byte travels least.

For copies alone: a sum that went round would add its numbers in the order of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport._algorithms.team import Team
from transport._call import Call
from transport._link import wait_all
from transport._operands.flat import as_bytes
from transport._operands.reduce_op import Flat


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Pass ``outputs[rank]``, which is in place already, round to all. Sizes may differ."""
    rank, size = team.rank, team.size
    onward, behind = team.link((rank + 1) % size, call), team.link((rank - 1) % size, call)
    blocks = [as_bytes(outputs[(rank - step) % size]) for step in range(size)]
    arriving = [behind.post_recv(call, block) for block in blocks[1:]]
    sent = [onward.post_send(call, blocks[0])]
    for request, block in zip(arriving[:-1], blocks[1:-1], strict=True):
        request.wait()
        sent.append(onward.post_send(call, block))
    wait_all(arriving[-1:])
    wait_all(sent)
