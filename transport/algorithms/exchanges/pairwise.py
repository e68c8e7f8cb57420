"""Pairwise exchanges: in each step a rank sends to one rank and receives from one.

Copies go to rank + s and come from rank - s in step s. Reductions go both ways between ranks at
distance d = 1, 2, …, rank ^ d, which is the order of addition (``transport.operands.order``).

No step waits for what another one brought, unlike a ring's, so a rank that is held up holds up
nobody else before the end; and a reduction sends nothing but inputs, so floats of 8 and 16 bits
travel as they are and are widened by the receiver. The price is a connection to every member.

On links with delay, ``pairwise_ahead`` does the same without waiting in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.exchanges import pairwise_ahead
from transport.algorithms.exchanges.ahead import is_far
from transport.algorithms.exchanges.overlap import MOST_BEHIND
from transport.algorithms.exchanges.partial import Part, Partial
from transport.algorithms.team import Team
from transport.call import Call
from transport.link import Link
from transport.operands.flat import as_bytes, part_bounds
from transport.operands.operand import store
from transport.operands.order import arrivals
from transport.operands.reduce_op import Flat, ReduceOp, reduction_dtype


def all_to_all(team: Team, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
    """Copy ``inputs[j]`` of member i into ``outputs[i]`` of member j. Sizes may all differ."""
    rank, size = team.rank, team.size
    store(outputs[rank], inputs[rank])
    _swap(
        team,
        call,
        [as_bytes(inputs[(rank + step) % size]) for step in range(1, size)],
        [as_bytes(outputs[(rank - step) % size]) for step in range(1, size)],
    )


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Send ``outputs[rank]``, which is in place already, to all. Sizes may differ."""
    rank, size = team.rank, team.size
    own = as_bytes(outputs[rank])
    arriving = [as_bytes(outputs[(rank - step) % size]) for step in range(1, size)]
    _swap(team, call, [own] * (size - 1), arriving)


def _swap(
    team: Team, call: Call, sent: Sequence[memoryview], arriving: Sequence[memoryview]
) -> None:
    """Carry out steps 1, 2, …, each of which has an item in ``sent`` and one in ``arriving``."""
    rank, size = team.rank, team.size
    onward = [team.link((rank + step) % size, call) for step in range(1, size)]
    behind = [team.link((rank - step) % size, call) for step in range(1, size)]
    if swap_at_once(team, call, onward, sent, behind, arriving):
        return
    team.overlap.settle()
    for data, link, into, source in zip(sent, onward, arriving, behind, strict=True):
        link.exchange(call, data, source, into)


def swap_at_once(
    team: Team,
    call: Call,
    onward: Sequence[Link],
    sent: Sequence[memoryview],
    behind: Sequence[Link],
    arriving: Sequence[memoryview],
) -> bool:
    """Send an item of ``sent`` over each link ``onward``, and receive one of ``arriving`` from each
    ``behind``, without waiting for one before another is sent; return False, and do nothing, where
    that has no use or no room.

    On each link the same frames pass in the same order, whichever way its two ends choose.
    """
    if all(data.nbytes <= link.eager_bytes for data, link in zip(sent, onward, strict=True)):
        team.overlap.settle()
        # Nobody is waited for before the others have what they wait for.
        for data, link in zip(sent, onward, strict=True):
            link.send(call, data)
        for into, link in zip(arriving, behind, strict=True):
            link.recv_into(call, into)
        return True
    several = len(onward) > 1 or (team.overlap.turns is not None and sent[0].nbytes <= MOST_BEHIND)
    if several and any(is_far(link) for link in onward):
        team.overlap.begin()
        pairwise_ahead.swap(team.overlap, call, onward, sent, behind, arriving)
        return True
    return False


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce ``buffer`` in place. Inputs that are scaled (PREMUL_SUM) must be so already, unless
    their dtype is reduced in a wider one: scaling must not round.
    """
    size = team.size
    wide = reduction_dtype(buffer.dtype).itemsize
    laps, ahead = pairwise_ahead.schedule(team, call, op, -(-buffer.size // size) * wide)
    if ahead:
        pairwise_ahead.all_reduce(team, call, buffer, op, laps, ahead)
        return
    team.overlap.settle()
    for lap in range(laps):
        parts, chunks = pairwise_ahead.cut(buffer, laps, lap, size)
        _reduce_own(team, call, parts, chunks[team.rank], op)
        all_gather(team, call, chunks)


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``. Sizes may differ; inputs stay as they were."""
    wide = reduction_dtype(output.dtype).itemsize
    longest = max(part.size for part in inputs)
    laps, ahead = pairwise_ahead.schedule(team, call, op, longest * wide)
    if ahead:
        pairwise_ahead.reduce_scatter(team, call, output, inputs, op, laps, ahead)
        return
    team.overlap.settle()
    for lap in range(laps):
        parts = [(part, *part_bounds(part.size, laps, lap)) for part in inputs]
        result = output[slice(*part_bounds(output.size, laps, lap))]
        _reduce_own(team, call, parts, result, op)


def _reduce_own(team: Team, call: Call, parts: Sequence[Part], result: Flat, op: ReduceOp) -> None:
    """Send each member its part, reduce what comes for this rank into ``result``, finish it."""
    partial = Partial(team, op, parts[team.rank], result)
    for peer, _ in arrivals(team.rank, team.size):
        sent = as_bytes(partial.outgoing(parts[peer]))
        link = team.link(peer, call)
        into, on_piece = partial.expect_next()
        link.exchange(call, sent, link, as_bytes(into), on_piece)
        partial.add()
    partial.finish()
