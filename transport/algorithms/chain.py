"""Pipelined chains: data passes from rank to rank in segments, all links busy at once.

Each byte crosses each link once, which for broadcast and reduce is the least that n - 1 receivers
(or senders) allow; the cost of the pipeline's length is n - 2 segments. Ranks are counted from
the root. With two ranks there is nobody to pass data on to, and one frame does; so it does for a
broadcast over links that pass a frame on while it comes.
"""

from __future__ import annotations

from itertools import pairwise

from transport.algorithms.team import Team
from transport.call import Call
from transport.link import Link, PacedLink
from transport.operands.flat import as_bytes, laps_of, part_bounds
from transport.operands.operand import ARRIVING, ARRIVING_NEXT, Arrival, Operand, store
from transport.operands.reduce_op import Flat, ReduceOp


def broadcast(team: Team, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` into everybody's."""
    size = team.size
    place = (team.rank - root) % size
    behind = team.link((team.rank - 1) % size, call) if place else None
    onward = team.link((team.rank + 1) % size, call) if place < size - 1 else None
    if size == 2 or isinstance(behind or onward, PacedLink):  # as on all members
        _broadcast_whole(call, as_bytes(buffer), behind, onward)
        return
    laps = laps_of(buffer.nbytes, team.table.segment)
    segments = [
        as_bytes(buffer[slice(*part_bounds(buffer.size, laps, lap))]) for lap in range(laps)
    ]
    if behind is None:
        assert onward is not None
        for segment in segments:
            onward.send(call, segment)
        return
    behind.recv_into(call, segments[0])
    for held, segment in pairwise(segments):
        if onward is None:
            behind.recv_into(call, segment)
        else:
            onward.exchange(call, held, behind, segment)
    if onward is not None:
        onward.send(call, segments[-1])


def _broadcast_whole(
    call: Call, data: memoryview, behind: Link | None, onward: Link | None
) -> None:
    """Pass all on as one frame: each link has it under way as fast as it takes it, and a frame
    costs the interpreter what it costs but once.
    """
    if behind is None:
        assert onward is not None
        onward.send(call, data)
    elif onward is None:
        behind.recv_into(call, data)
    else:
        assert isinstance(onward, PacedLink)
        onward.relay(call, behind, data)


def reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
    """Reduce into ``root``'s ``buffer``; the others' stay as they were.

    The last place sends first; each place puts its operand before what arrives.
    """
    size, table = team.size, team.table
    place = (team.rank - root) % size
    operand = Operand(team.scratch, op, buffer.dtype)
    laps = laps_of(buffer.size * operand.dtype.itemsize, table.segment)
    behind = team.link((team.rank + 1) % size, call) if place < size - 1 else None
    onward = team.link((team.rank - 1) % size, call) if place else None
    held: Flat | None = None
    for lap in range(laps):
        start, stop = part_bounds(buffer.size, laps, lap)
        own = operand.load(buffer, start, stop)
        if behind is None:
            assert onward is not None
            onward.send(call, as_bytes(own))
            continue
        slot = ARRIVING_NEXT if lap % 2 else ARRIVING
        arriving = team.scratch.flat(slot, operand.dtype, stop - start)
        if onward is None:
            behind.recv_into(call, as_bytes(arriving))
            op.combine(own, arriving, arriving)
            op.finish(arriving, size)
            store(buffer[start:stop], arriving)
            continue
        arrival = Arrival(op, own, arriving, arriving, table.piece)
        if held is None:
            behind.recv_into(call, as_bytes(arriving))
        else:
            onward.exchange(call, as_bytes(held), behind, as_bytes(arriving), arrival.on_piece())
        arrival.finish()
        held = arriving
    if held is not None:
        assert onward is not None
        onward.send(call, as_bytes(held))
