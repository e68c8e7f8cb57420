"""Binomial trees: log2(n) levels, rooted anywhere. Few steps, so best for small data.

Ranks are counted from the root: place p = (rank - root) mod n. The parent of p is p without its
lowest bit that is set; its children are p + d for each power of two d below that bit.
"""

from __future__ import annotations

from transport.algorithms.team import Team
from transport.call import Call
from transport.operands.flat import as_bytes, laps_of, part_bounds
from transport.operands.operand import ARRIVING, TOTAL, Operand, store
from transport.operands.reduce_op import Flat, ReduceOp


def broadcast(team: Team, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` into everybody's."""
    size = team.size
    place = (team.rank - root) % size
    data = as_bytes(buffer)
    distance = 1
    while distance < size and not place & distance:
        distance *= 2
    if place:
        team.link((place - distance + root) % size, call).recv_into(call, data)
    while distance > 1:
        distance //= 2
        if place + distance < size:
            team.link((place + distance + root) % size, call).send(call, data)


def reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
    """Reduce into ``root``'s ``buffer``; the others' stay as they were.

    Operands are combined in the order of the ranks counted from the root.
    """
    operand = Operand(team.scratch, op, buffer.dtype)
    laps = laps_of(buffer.size * operand.dtype.itemsize, team.table.segment)
    for lap in range(laps):  # for the sake of scratch memory: most calls take one
        _reduce(team, call, operand, buffer, part_bounds(buffer.size, laps, lap), op, root)


def _reduce(
    team: Team,
    call: Call,
    operand: Operand,
    buffer: Flat,
    bounds: tuple[int, int],
    op: ReduceOp,
    root: int,
) -> None:
    size, scratch = team.size, team.scratch
    place = (team.rank - root) % size
    total = operand.load(buffer, *bounds)
    arriving = scratch.flat(ARRIVING, operand.dtype, total.size)
    distance = 1
    while distance < size and not place & distance:
        if place + distance < size:
            team.link((place + distance + root) % size, call).recv_into(call, as_bytes(arriving))
            out = total if place == 0 else scratch.flat(TOTAL, operand.dtype, total.size)
            op.combine(total, arriving, out)
            total = out
        distance *= 2
    if place:
        team.link((place - distance + root) % size, call).send(call, as_bytes(total))
    else:
        op.finish(total, size)
        store(buffer[slice(*bounds)], total)
