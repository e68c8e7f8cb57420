"""Algorithms along the tree of ``transport._operands.order``: few steps, so best for small data.

A binomial tree may have any root. Each block's value is sent to the member that represents the
block one level up; this is the root if that block contains it. This takes log2(n) levels and the
fewest frames.

Recursive doubling among n = 2^k ranks takes the fewest steps: log2(n) exchanges of all the data,
nearest ranks first. After Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005). In step k both partners hold the value of their block of 2^k ranks, and
both add the two halves of the block of 2^(k+1).
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
    """Copy ``root``'s ``buffer`` to all members."""
    parent, children = relatives(team.rank, team.size, root)
    data = as_bytes(buffer)
    if parent is not None:
        team.link(parent, call).recv_into(call, data)
    wait_all([team.link(child, call).post_send(call, data) for child, _ in reversed(children)])


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce the members' ``buffer`` in place, without ``op.prepare`` and ``op.finish``."""
    _reduce(team, call, buffer, buffer, op, 0)
    broadcast(team, call, buffer, 0)


def doubling_all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Do the same as ``all_reduce`` in half as many steps. Needs a power of two of members."""
    arriving = team.scratch.flat(ARRIVING, buffer.dtype, buffer.size)
    own, received = as_bytes(buffer), as_bytes(arriving)
    distance = 1
    while distance < team.size:
        partner = team.rank ^ distance
        link = team.link(partner, call)
        exchange(call, link, own, link, received)
        op.combine(*((arriving, buffer) if partner < team.rank else (buffer, arriving)), buffer)
        distance *= 2


def reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
    """Reduce into ``root``'s ``buffer``; the other members' buffers are not changed."""
    operand = Operand(team.scratch, op, buffer.dtype)
    chunks = segments_of(buffer.size * operand.dtype.itemsize, team.table.segment)
    for chunk in range(chunks):  # Chunks bound the scratch memory; most calls need only one.
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
    """Add the children's values to ``own``, send the sum to the parent, and return it.

    The sum is in ``total``, or in ``own`` if this rank has no children.
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
