"""Recursive doubling: log2(n) exchanges of everything among n = 2^k ranks, nearest first.

The fewest steps, so best for small data. After Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005). In step k both partners hold the value of
their block of 2^k ranks, and both add the two halves of the block of 2^(k+1): the tree of
``transport._operands.order``, level by level.
"""

from __future__ import annotations

from transport._algorithms.team import Team
from transport._call import Call
from transport._link import exchange
from transport._operands.flat import as_bytes
from transport._operands.operand import ARRIVING
from transport._operands.reduce_op import Flat, ReduceOp


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce the members' ``buffer`` in place; neither prepares nor finishes."""
    arriving = team.scratch.flat(ARRIVING, buffer.dtype, buffer.size)
    mine, theirs = as_bytes(buffer), as_bytes(arriving)
    distance = 1
    while distance < team.size:
        partner = team.rank ^ distance
        link = team.link(partner, call)
        exchange(call, link, mine, link, theirs)
        if partner < team.rank:
            op.combine(arriving, buffer, buffer)
        else:
            op.combine(buffer, arriving, buffer)
        distance *= 2
