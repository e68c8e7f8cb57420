"""Pipelined chains: data passes from rank to rank in segments, all links busy at once.

Each byte crosses each link once, which for a broadcast is the least that n - 1 receivers allow; the
cost of the pipeline's length is n - 2 segments. Ranks are counted from the root. With two ranks
one segment does.
"""

from __future__ import annotations

from transport._algorithms.team import Team
from transport._call import Call
from transport._link import Request, wait_all
from transport._operands.flat import as_bytes, part_bounds, segments_of
from transport._operands.reduce_op import Flat


def broadcast(team: Team, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` into everybody's."""
    size = team.size
    place = (team.rank - root) % size
    behind = team.link((team.rank - 1) % size, call) if place else None
    onward = team.link((team.rank + 1) % size, call) if place < size - 1 else None
    count = segments_of(buffer.nbytes, team.table.segment) if size > 2 else 1
    segments = [as_bytes(buffer[slice(*part_bounds(buffer.size, count, i))]) for i in range(count)]
    arriving: list[Request | None] = [None] * count
    if behind is not None:
        arriving = [behind.post_recv(call, segment) for segment in segments]
    sent: list[Request] = []
    for request, segment in zip(arriving, segments, strict=True):
        if request is not None:
            request.wait()
        if onward is not None:
            sent.append(onward.post_send(call, segment))
    wait_all(sent)
