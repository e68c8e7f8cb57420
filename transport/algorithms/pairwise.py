"""Pairwise exchanges: in step s every rank sends to rank + s and receives from rank - s.

No step waits for what another one brought, unlike a ring's, so a rank that is held up holds up
nobody else before the end; and a reduction sends nothing but inputs, so floats of 8 and 16 bits
travel as they are and are widened by the receiver. The price is a connection to every member.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.algorithms.team import Team
from transport.call import Call
from transport.flat import as_bytes, laps_of, part_bounds
from transport.operands.operand import (
    ARRIVING,
    ARRIVING_NEXT,
    LOADED,
    TOTAL,
    Arrival,
    Operand,
    store,
)
from transport.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype

Part = tuple[Flat, int, int]
"""Elements ``[1]`` to ``[2]`` of a buffer."""


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
    # On each link the same frames pass in the same order, whichever way its two ends choose.
    if all(data.nbytes <= link.eager_bytes for data, link in zip(sent, onward, strict=True)):
        # Nobody is waited for before the others have what they wait for.
        for data, link in zip(sent, onward, strict=True):
            link.send(call, data)
        for into, link in zip(arriving, behind, strict=True):
            link.recv_into(call, into)
        return
    for data, link, into, source in zip(sent, onward, arriving, behind, strict=True):
        link.exchange(call, data, source, into)


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce ``buffer`` in place. Inputs that are scaled (PREMUL_SUM) must be so already, unless
    their dtype is reduced in a wider one: scaling must not round.
    """
    size = team.size
    wide = reduction_dtype(buffer.dtype).itemsize
    laps = laps_of(buffer.size * wide, team.table.segment * size)
    for lap in range(laps):
        start, stop = part_bounds(buffer.size, laps, lap)
        bounds = [part_bounds(stop - start, size, member) for member in range(size)]
        parts = [(buffer, start + low, start + high) for low, high in bounds]
        chunks = [buffer[low:high] for _, low, high in parts]
        _reduce_own(team, call, parts, chunks[team.rank], op)
        all_gather(team, call, chunks)


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``. Sizes may differ; inputs stay as they were."""
    wide = reduction_dtype(output.dtype).itemsize
    laps = laps_of(max(part.size for part in inputs) * wide, team.table.segment)
    for lap in range(laps):
        parts = [(part, *part_bounds(part.size, laps, lap)) for part in inputs]
        result = output[slice(*part_bounds(output.size, laps, lap))]
        _reduce_own(team, call, parts, result, op)


def _reduce_own(team: Team, call: Call, parts: Sequence[Part], result: Flat, op: ReduceOp) -> None:
    """Send each member its part, reduce what comes for this rank into ``result``, finish it."""
    rank, size, scratch = team.rank, team.size, team.scratch
    own = Operand(scratch, op, result.dtype, TOTAL).load(*parts[rank])
    narrow = own.dtype != result.dtype
    total = own if narrow else result
    # A scaled input travels in the dtype in which it was scaled: the factor is the sender's.
    scaled = Operand(scratch, op, result.dtype, LOADED) if op.kind is RedOpType.PREMUL_SUM else None
    arriving = scratch.flat(ARRIVING, own.dtype if scaled else result.dtype, own.size)
    for step in range(1, size):
        target, source = (rank + step) % size, (rank - step) % size
        buffer, start, stop = parts[target]
        sent = as_bytes(scaled.load(buffer, start, stop) if scaled else buffer[start:stop])
        onward, behind = team.link(target, call), team.link(source, call)
        if arriving.dtype == own.dtype:
            arrival = Arrival(op, arriving, own, total, team.table.piece)
            onward.exchange(call, sent, behind, as_bytes(arriving), arrival.on_piece())
            arrival.finish()
        else:
            onward.exchange(call, sent, behind, as_bytes(arriving))
            widened = scratch.flat(ARRIVING_NEXT, own.dtype, own.size)
            np.copyto(widened, arriving, casting="unsafe")
            op.combine(widened, own, total)
        own = total
    op.finish(total, size)
    if narrow:
        store(result, total)
