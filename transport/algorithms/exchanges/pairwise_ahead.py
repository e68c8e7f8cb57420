"""Pairwise exchanges on links with delay: what is to be sent leaves before what comes is there.

The bits are those of ``pairwise``, as are the frames on each link; their order is another one. An
input is sent as soon as the link has room for it, so many laps ahead of those that are reduced that
the wire is never idle. Results follow as they are ready. Nothing is kept for this: inputs leave
from the caller's memory, and what arrives is reduced at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.exchanges.partial import Part, Partial
from transport.algorithms.team import Team
from transport.call import Call
from transport.link import Link, Outbox, PacedLink
from transport.operands.flat import as_bytes, part_bounds
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp


def laps_ahead(team: Team, call: Call, op: ReduceOp, laps: int) -> int:
    """Return by how many laps inputs are to be sent ahead; 0: not at all. Every member calls."""
    if op.kind is RedOpType.PREMUL_SUM or (laps == 1 and team.size == 2):
        # Scaled inputs leave from scratch memory, which has room for one.
        return 0
    segment, under_way = team.table.segment, team.ahead(call)
    # In each lap there is an input and a result on a link.
    return -(-under_way // (2 * segment)) if under_way >= segment else 0


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp, laps: int, ahead: int) -> None:
    """Reduce ``buffer`` in place.

    A link carries the inputs of laps 0 to ``ahead``, then by turns the result of a lap and the
    input of the one that is as far ahead. A result comes into the place of an input only when its
    sender has that input.
    """
    rank, size = team.rank, team.size
    targets, sources = _peers(team)
    pieces = [cut(buffer, laps, lap, size) for lap in range(laps)]
    onward = [team.link(peer, call) for peer in targets]
    behind = [team.link(peer, call) for peer in sources]
    with _outbox(onward, call) as outbox:

        def send_inputs(lap: int) -> None:
            if lap < laps:
                for link, peer in zip(onward, targets, strict=True):
                    outbox.post(link, as_bytes(pieces[lap][1][peer]))

        for lap in range(ahead + 1):
            send_inputs(lap)
        for lap in range(laps + ahead + 1):
            earlier = lap - ahead - 1
            if earlier >= laps:
                break
            if earlier >= 0:
                for link, peer in zip(behind, sources, strict=True):
                    outbox.receive(link, as_bytes(pieces[earlier][1][peer]))
            if lap >= laps:
                continue
            parts, chunks = pieces[lap]
            _reduce(team, outbox, behind, op, parts[rank], chunks[rank])
            result = as_bytes(chunks[rank])
            for link in onward:
                outbox.post(link, result)
            send_inputs(lap + ahead + 1)


def reduce_scatter(
    team: Team,
    call: Call,
    output: Flat,
    inputs: Sequence[Flat],
    op: ReduceOp,
    laps: int,
    ahead: int,
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``. Sizes may differ; inputs stay as they were."""
    rank = team.rank
    targets, sources = _peers(team)
    onward = [team.link(peer, call) for peer in targets]
    behind = [team.link(peer, call) for peer in sources]
    with _outbox(onward, call) as outbox:

        def send_inputs(lap: int) -> None:
            if lap < laps:
                for link, peer in zip(onward, targets, strict=True):
                    part = inputs[peer]
                    bounds = part_bounds(part.size, laps, lap)
                    outbox.post(link, as_bytes(part[slice(*bounds)]))

        for lap in range(ahead):
            send_inputs(lap)
        for lap in range(laps):
            send_inputs(lap + ahead)
            own = inputs[rank]
            part = (own, *part_bounds(own.size, laps, lap))
            result = output[slice(*part_bounds(output.size, laps, lap))]
            _reduce(team, outbox, behind, op, part, result)


def swap(
    call: Call,
    onward: Sequence[Link],
    sent: Sequence[memoryview],
    behind: Sequence[Link],
    arriving: Sequence[memoryview],
) -> None:
    """Send ``sent[i]`` on ``onward[i]`` and receive ``arriving[i]`` from ``behind[i]``."""
    with _outbox(onward, call) as outbox:
        for link, data in zip(onward, sent, strict=True):
            outbox.post(link, data)
        for link, into in zip(behind, arriving, strict=True):
            outbox.receive(link, into)


def cut(buffer: Flat, laps: int, lap: int, size: int) -> tuple[list[Part], list[Flat]]:
    """Return what of ``buffer`` each member reduces in one of ``laps`` laps, in both ways."""
    start, stop = part_bounds(buffer.size, laps, lap)
    bounds = [part_bounds(stop - start, size, member) for member in range(size)]
    parts = [(buffer, start + low, start + high) for low, high in bounds]
    return parts, [buffer[low:high] for _, low, high in parts]


def _peers(team: Team) -> tuple[list[int], list[int]]:
    """Return whom this rank sends to, and whom it receives from, in the order of the steps."""
    rank, size = team.rank, team.size
    steps = range(1, size)
    return [(rank + step) % size for step in steps], [(rank - step) % size for step in steps]


def _outbox(links: Sequence[Link], call: Call) -> Outbox:
    link = links[0]
    assert isinstance(link, PacedLink)
    return link.outbox(call)


def _reduce(
    team: Team, outbox: Outbox, behind: Sequence[Link], op: ReduceOp, own: Part, result: Flat
) -> None:
    """Receive this rank's part of one lap from all, and reduce it into ``result``."""
    partial = Partial(team, op, own, result)
    for link in behind:
        into, on_piece = partial.expect()
        outbox.receive(link, into, on_piece)
        partial.add()
    partial.finish()
