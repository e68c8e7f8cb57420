"""Star algorithms: all ranks send to rank 0, which replies. 2 (n - 1) frames, the minimum.

With more ranks than cores, each frame costs a context switch, so the algorithm with the fewest
frames beats the one with the fewest steps. With few ranks and a core for each, rank 0's work is
short compared with two latencies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport._algorithms.team import Team
from transport._calls.call import Call
from transport._link import Link, wait_all
from transport._operands.flat import as_bytes
from transport._operands.operand import ARRIVING, TOTAL, pack, store
from transport._operands.order import add_all
from transport._operands.reduce_op import Flat, ReduceOp

_CENTRE = 0


def barrier(team: Team, call: Call) -> None:
    """Wait until every member has called."""
    nothing = memoryview(bytearray())
    if team.rank != _CENTRE:
        _exchange(team, call, nothing, nothing)
        return
    others = _others(team, call)
    wait_all([link.post_recv(call, nothing) for link in others])
    wait_all([link.post_send(call, nothing) for link in others])


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce the members' ``buffer`` in place, without ``op.prepare`` and ``op.finish``."""
    data = as_bytes(buffer)
    if team.rank != _CENTRE:
        _exchange(team, call, data, data)
        return
    others = _others(team, call)
    _reduce(team, call, others, buffer, op)
    wait_all([link.post_send(call, data) for link in others])


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``. All inputs travel packed in one frame."""
    total, parts = pack(team.scratch, op, inputs)
    own = parts[team.rank]
    if team.rank != _CENTRE:
        _exchange(team, call, as_bytes(total), as_bytes(own))
    else:
        others = _others(team, call)
        _reduce(team, call, others, total, op)
        sends = zip(others, parts[1:], strict=True)
        wait_all([link.post_send(call, as_bytes(part)) for link, part in sends])
    op.finish(own, team.size)
    store(output, own)


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Send ``outputs[rank]``, which is already in place, to all members. Sizes may differ."""
    own = outputs[team.rank]
    total = team.scratch.flat(TOTAL, own.dtype, sum(output.size for output in outputs))
    if team.rank != _CENTRE:
        _exchange(team, call, as_bytes(own), as_bytes(total))
        start = 0
        for place, output in enumerate(outputs):
            if place != team.rank:
                output[:] = total[start : start + output.size]
            start += output.size
        return
    others = _others(team, call)
    receives = zip(others, outputs[1:], strict=True)
    wait_all([link.post_recv(call, as_bytes(output)) for link, output in receives])
    np.concatenate(outputs, out=total)
    wait_all([link.post_send(call, as_bytes(total)) for link in others])


def _exchange(team: Team, call: Call, data: memoryview, result: memoryview) -> None:
    """Send ``data`` to the centre, and receive ``result`` from it."""
    link = team.link(_CENTRE, call)
    link.send(call, data)
    link.recv_into(call, result)


def _others(team: Team, call: Call) -> list[Link]:
    return [team.link(member, call) for member in range(1, team.size)]


def _reduce(team: Team, call: Call, others: list[Link], total: Flat, op: ReduceOp) -> None:
    count = total.size
    rows = team.scratch.flat(ARRIVING, total.dtype, len(others) * count)
    values = [rows[i * count : (i + 1) * count] for i in range(len(others))]
    arriving = zip(others, values, strict=True)
    wait_all([link.post_recv(call, as_bytes(value)) for link, value in arriving])
    add_all(op, [total, *values])
