"""Binomial trees: log2(n) levels, rooted anywhere. Few steps, so best for small data.

Ranks are counted from the root: place p = (rank - root) mod n; see ``relatives``.
"""

from __future__ import annotations

from transport.algorithms.team import Team
from transport.call import Call
from transport.choosing.peers import relatives
from transport.operands.flat import as_bytes, laps_of, part_bounds
from transport.operands.operand import ARRIVING, TOTAL, Operand, store
from transport.operands.reduce_op import Flat, ReduceOp


def broadcast(team: Team, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` into everybody's."""
    size = team.size
    place = (team.rank - root) % size
    parent, children = relatives(place, size)
    data = as_bytes(buffer)
    if parent is not None:
        team.link((parent + root) % size, call).recv_into(call, data)
    for child in children:
        team.link((child + root) % size, call).send(call, data)


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
    parent, children = relatives(place, size)
    total = operand.load(buffer, *bounds)
    arriving = scratch.flat(ARRIVING, operand.dtype, total.size)
    for child in reversed(children):
        team.link((child + root) % size, call).recv_into(call, as_bytes(arriving))
        out = total if parent is None else scratch.flat(TOTAL, operand.dtype, total.size)
        op.combine(total, arriving, out)
        total = out
    if parent is not None:
        team.link((parent + root) % size, call).send(call, as_bytes(total))
    else:
        op.finish(total, size)
        store(buffer[slice(*bounds)], total)
