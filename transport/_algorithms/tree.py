"""Algorithms along the tree of ``transport._operands.order``: few steps, so best for small data.

A binomial tree may be rooted anywhere. A block's value goes to the member that speaks for the block
above: the root, wherever that is inside. This takes log2(n) levels and the fewest frames.

Recursive doubling among n = 2^k ranks is log2(n) exchanges of everything, nearest first, the fewest
steps. After Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005). In step k both partners hold the value of their block of 2^k ranks, and both add the
two halves of the block of 2^(k+1).
"""

from __future__ import annotations

from transport._algorithms.team import Team
from transport._calls.call import Call
from transport._link import exchange, wait_all
from transport._operands.flat import as_bytes, part_bounds, segments_of
from transport._operands.operand import ARRIVING, TOTAL, Operand, store
from transport._operands.order import relatives
from transport._operands.reduce_op import Flat, ReduceOp


def broadcast(team: Team, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` into everybody's."""
    parent, children = relatives(team.rank, team.size, root)
    data = as_bytes(buffer)
    if parent is not None:
        team.link(parent, call).recv_into(call, data)
    wait_all([team.link(child, call).post_send(call, data) for child, _ in reversed(children)])


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce the members' ``buffer`` in place; neither prepares nor finishes."""
    _reduce(team, call, buffer, buffer, op, 0)
    broadcast(team, call, buffer, 0)


def doubling_all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce the members' ``buffer`` in place; neither prepares nor finishes."""
    arriving = team.scratch.flat(ARRIVING, buffer.dtype, buffer.size)
    mine, theirs = as_bytes(buffer), as_bytes(arriving)
    distance = 1
    while distance < team.size:
        partner = team.rank ^ distance
        link = team.link(partner, call)
        exchange(call, link, mine, link, theirs)
        op.combine(*((arriving, buffer) if partner < team.rank else (buffer, arriving)), buffer)
        distance *= 2


def reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
    """Reduce into ``root``'s ``buffer``; the others' stay as they were."""
    operand = Operand(team.scratch, op, buffer.dtype)
    chunks = segments_of(buffer.size * operand.dtype.itemsize, team.table.segment)
    for chunk in range(chunks):  # for the sake of scratch memory: most calls take one
        start, stop = part_bounds(buffer.size, chunks, chunk)
        own = operand.load(buffer, start, stop)
        result = buffer[start:stop]
        at_root = team.rank == root and own.dtype == result.dtype
        total = result if at_root else team.scratch.flat(TOTAL, own.dtype, own.size)
        reduced = _reduce(team, call, own, total, op, root)
        if team.rank == root:
            op.finish(reduced, team.size)
            if reduced is not result:
                store(result, reduced)


def _reduce(team: Team, call: Call, own: Flat, total: Flat, op: ReduceOp, root: int) -> Flat:
    """Add what this rank's children have to its ``own``, pass that on to its parent, and return it:
    ``total``, or ``own`` if there are none.
    """
    parent, children = relatives(team.rank, team.size, root)
    arriving = team.scratch.flat(ARRIVING, own.dtype, own.size)
    value = own
    for child, lower in children:
        team.link(child, call).recv_into(call, as_bytes(arriving))
        op.combine(*((arriving, value) if lower else (value, arriving)), total)
        value = total
    if parent is not None:
        team.link(parent, call).send(call, as_bytes(value))
    return value
