"""Rings: n - 1 steps, each to the next rank and from the one before; every byte travels least.

Reduce-scatter followed by all-gather is the all-reduce of Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009). Large data goes round in segments, so
that what is being reduced stays in cache and scratch memory is bounded. A chunk is reduced in the
order of the ring, from the rank behind its owner round to its owner: the same in every run, and
in one place, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transport.algorithms.team import Team
from transport.call import Call
from transport.operands.flat import as_bytes, laps_of, part_bounds
from transport.operands.operand import (
    ARRIVING,
    ARRIVING_NEXT,
    LOADED,
    TOTAL,
    Arrival,
    Operand,
)
from transport.operands.reduce_op import Flat, ReduceOp


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce ``buffer`` in place, whose dtype is its own reduction dtype; does not prepare."""
    rank, size = team.rank, team.size
    laps = laps_of(buffer.nbytes, team.table.segment * size)
    for lap in range(laps):
        start, stop = part_bounds(buffer.size, laps, lap)
        segment = buffer[start:stop]
        chunks = [segment[slice(*part_bounds(segment.size, size, i))] for i in range(size)]
        _reduce_own(team, call, lambda member, _, chunks=chunks: chunks[member], chunks[rank], op)
        all_gather(team, call, chunks)


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``, whose dtype is its own reduction dtype.

    Sizes may differ; inputs stay as they were.
    """
    # Two, by turns: the first part is still to be sent when the second is loaded.
    operands = [Operand(team.scratch, op, output.dtype, slot) for slot in (LOADED, TOTAL)]
    laps = laps_of(max(part.nbytes for part in inputs), team.table.segment)
    for lap in range(laps):

        def load(member: int, step: int, lap: int = lap) -> Flat:
            part = inputs[member]
            return operands[step % 2].load(part, *part_bounds(part.size, laps, lap))

        result = output[slice(*part_bounds(output.size, laps, lap))]
        _reduce_own(team, call, load, result, op)


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Pass ``outputs[rank]``, which is in place already, round to all. Sizes may differ."""
    rank, size = team.rank, team.size
    onward, behind = team.link((rank + 1) % size, call), team.link((rank - 1) % size, call)
    for step in range(size - 1):
        sent, arriving = outputs[(rank - step) % size], outputs[(rank - step - 1) % size]
        onward.exchange(call, as_bytes(sent), behind, as_bytes(arriving))


def _reduce_own(
    team: Team, call: Call, load: Callable[[int, int], Flat], result: Flat, op: ReduceOp
) -> None:
    """Reduce what the members ``load`` for this rank into ``result``, and finish it.

    ``load(member, step)`` is this rank's input for ``member``. Partial results stay in scratch,
    hot in cache, and are sent from there.
    """
    rank, size, scratch = team.rank, team.size, team.scratch
    onward, behind = team.link((rank + 1) % size, call), team.link((rank - 1) % size, call)
    partial = load((rank - 1) % size, 1)
    for step in range(2, size + 1):
        own = load((rank - step) % size, step)
        arriving = scratch.flat(ARRIVING_NEXT if step % 2 else ARRIVING, own.dtype, own.size)
        total = result if step == size else arriving
        arrival = Arrival(op, arriving, own, total, team.table.piece)
        onward.exchange(call, as_bytes(partial), behind, as_bytes(arriving), arrival.on_piece())
        arrival.finish()
        partial = total
    op.finish(result, size)
