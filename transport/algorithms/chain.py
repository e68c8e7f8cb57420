"""Pipelined chains: data passes from rank to rank in segments, all links busy at once.

Each byte crosses each link once, which for a broadcast is the least that n - 1 receivers allow; the
cost of the pipeline's length is n - 2 segments. Ranks are counted from the root. With two ranks
one frame does, as it does over links that pass a frame on while it comes.
"""

from __future__ import annotations

from itertools import pairwise

from transport.algorithms.team import Team
from transport.call import Call
from transport.link import Link, QueuedLink
from transport.operands.flat import as_bytes, laps_of, part_bounds
from transport.operands.reduce_op import Flat


def broadcast(team: Team, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` into everybody's."""
    size = team.size
    place = (team.rank - root) % size
    behind = team.link((team.rank - 1) % size, call) if place else None
    onward = team.link((team.rank + 1) % size, call) if place < size - 1 else None
    if size == 2 or isinstance(behind or onward, QueuedLink):  # as on all members
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
        assert isinstance(onward, QueuedLink)
        onward.relay(call, behind, data)
