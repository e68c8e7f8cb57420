"""Recursive halving, nearest ranks first, then doubling: 2 log2(n) steps and the fewest bytes.

After Rabenseifner, "Optimization of Collective Reduction Operations" (2004), for any number of
ranks. The ranks are cut into blocks of decreasing powers of two: 13 = 8 + 4 + 1. In a block of 2^j
ranks, each exchange halves the data that a rank works on. In the end each rank has one of 2^j
parts, reduced over the block. The last block sends its parts to the previous block, whose ranks own
smaller parts, and so on. The ranks of the first block end up with the result.

The additions follow the tree in ``transport._operands.order``: each exchange adds one level of the
tree within a block. Each block is the right operand of the sum with all blocks before it.

The results return over the same connections in reverse order. All n ranks together send
2 (n - 1) N bytes, the same as a ring; no rank sends or receives more than 2 N.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport._algorithms.team import Team
from transport._calls.call import Call
from transport._choosing.blocks import ChunkRange, blocks_of, halving_schedule, reverse_bits
from transport._choosing.choice import ROUND_BYTES
from transport._link import exchange, wait_all
from transport._operands.flat import as_bytes, part_bounds, segments_of
from transport._operands.operand import ARRIVING, TOTAL, Operand
from transport._operands.order import StreamingReduction
from transport._operands.reduce_op import Flat, ReduceOp


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce ``buffer``, whose dtype is its reduction dtype, in place. Omits ``op.prepare``."""
    chunks = 1 << blocks_of(team.size)[0][1]
    rounds = segments_of(buffer.nbytes, ROUND_BYTES)
    for number in range(rounds):
        segment = buffer[slice(*part_bounds(buffer.size, rounds, number))]
        ends = [0, *(part_bounds(segment.size, chunks, i)[1] for i in range(chunks))]
        own = _reduce(team, call, segment, ends, op)
        op.finish(own, team.size)
        _gather(team, call, segment, ends)


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``, whose dtype is its reduction dtype.

    Sizes may differ; inputs are not changed. If the first block has b ranks, its rank r also
    reduces the part of rank r + b and sends it there.
    """
    rank, size = team.rank, team.size
    level = blocks_of(size)[0][1]
    first = 1 << level
    operand = Operand(team.scratch, op, output.dtype)
    rounds = segments_of(sum(part.nbytes for part in inputs), ROUND_BYTES)
    for number in range(rounds):
        bounds = [part_bounds(part.size, rounds, number) for part in inputs]
        counts = [stop - start for start, stop in bounds]
        packed = team.scratch.flat(TOTAL, operand.dtype, sum(counts))
        ends, end = [0], 0
        for chunk in range(first):
            for member in range(reverse_bits(chunk, level), size, first):
                begin, end = end, end + counts[member]
                np.copyto(packed[begin:end], operand.load(inputs[member], *bounds[member]))
            ends.append(end)
        own = _reduce(team, call, packed, ends, op)
        result = output[slice(*bounds[rank])]
        if rank < first:
            op.finish(own, size)
            np.copyto(result, own[: result.size])
            if rank + first < size:
                team.link(rank + first, call).send(call, as_bytes(own[result.size :]))
        else:
            team.link(rank - first, call).recv_into(call, as_bytes(result))


def _reduce(team: Team, call: Call, data: Flat, ends: Sequence[int], op: ReduceOp) -> Flat:
    """Reduce the members' ``data``, whose chunk i is ``data[ends[i]:ends[i + 1]]``.

    Returns this rank's part of the result, which is empty outside the first block.
    """
    schedule, rank, scratch = halving_schedule(team.rank, team.size), team.rank, team.scratch
    for partner, kept, given in schedule.inside:
        link, own = team.link(partner, call), _part(data, ends, kept)
        adding = StreamingReduction(scratch, op, ((partner > rank,),), own, own, team.table.piece)
        arriving, on_piece = adding.expect(data.dtype)
        sent = as_bytes(_part(data, ends, given))
        exchange(call, link, sent, link, as_bytes(arriving), on_piece)
        adding.add()
    own = _part(data, ends, schedule.own)
    if schedule.lower is not None:
        arriving = scratch.flat(ARRIVING, data.dtype, own.size)
        team.link(schedule.lower, call).recv_into(call, as_bytes(arriving))
        op.combine(own, arriving, own)
    upper = [
        (team.link(peer, call), as_bytes(_part(data, ends, span))) for peer, span in schedule.upper
    ]
    wait_all([link.post_send(call, each) for link, each in upper])
    return own if not schedule.upper else own[:0]


def _gather(team: Team, call: Call, data: Flat, ends: Sequence[int]) -> None:
    """Send all of ``data`` to all members. At first, each rank of the first block has a part."""
    schedule = halving_schedule(team.rank, team.size)
    upper = [
        (team.link(peer, call), as_bytes(_part(data, ends, span))) for peer, span in schedule.upper
    ]
    wait_all([link.post_recv(call, each) for link, each in upper])
    if schedule.lower is not None:
        team.link(schedule.lower, call).send(call, as_bytes(_part(data, ends, schedule.own)))
    for partner, kept, given in reversed(schedule.inside):
        link = team.link(partner, call)
        into = as_bytes(_part(data, ends, given))
        exchange(call, link, as_bytes(_part(data, ends, kept)), link, into)


def _part(data: Flat, ends: Sequence[int], span: ChunkRange) -> Flat:
    return data[ends[span.first] : ends[span.stop]]
