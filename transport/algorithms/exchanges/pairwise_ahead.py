"""Pairwise exchanges on links with delay: what is to be sent leaves before what comes is there.

The bits are those of ``pairwise``. Frames are in another order, and longer where there are many. An
input is sent as soon as the link has room for it, so many laps ahead of those that are reduced that
the wire is never idle. Results follow as they are ready. What is sent ahead is kept nowhere: inputs
leave from the caller's memory. All peers are received from at the same time, a frame of each in
memory of its own, and reduced in the order of addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transport.algorithms.exchanges.coming import Coming, Places
from transport.algorithms.exchanges.overlap import Overlap
from transport.algorithms.exchanges.partial import Part, Partial
from transport.algorithms.team import Team
from transport.call import Call
from transport.choosing.choice import levels_of
from transport.link import Link
from transport.operands.flat import as_bytes, laps_of, part_bounds
from transport.operands.order import arrivals
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp

# See ``_segments_a_frame``.
_LEAST_LAPS = 4
_MOST_SEGMENTS = 4
_SEGMENTS_IN_SCRATCH = 40


class Schedule(NamedTuple):
    """In how many ``laps`` a call goes, and by how many of them inputs are sent ahead; 0: not at
    all, so ``pairwise`` does it.
    """

    laps: int
    ahead: int


def schedule(team: Team, call: Call, op: ReduceOp, nbytes: int) -> Schedule:
    """Return the laps for parts of ``nbytes`` at most, as they are reduced. Every member calls."""
    segment = team.table.segment
    laps = laps_of(nbytes, segment)
    if op.kind is RedOpType.PREMUL_SUM or (laps == 1 and team.size == 2):
        # Scaled inputs leave from scratch memory, which has room for one.
        return Schedule(laps, 0)
    under_way = team.ahead(call)
    if not under_way:
        return Schedule(laps, 0)
    segment *= _segments_a_frame(laps, team.size)
    # In each lap there is an input and a result on a link.
    return Schedule(laps_of(nbytes, segment), -(-under_way // (2 * segment)))


def _segments_a_frame(laps: int, size: int) -> int:
    """Return how many of the segments, of which a call has so many ``laps``, travel as one frame.

    Where nothing is waited for in each lap, only what is done for each frame is left to be saved:
    as long as there are laps enough to be reduced while others arrive, and room for what arrives.
    """
    # Of each other member some that arrive, and the sums that wait for each other.
    room = _SEGMENTS_IN_SCRATCH // (Coming.MOST * (size - 1) + levels_of(size))
    return max(1, min(laps // _LEAST_LAPS, _MOST_SEGMENTS, room))


def order(laps: int, ahead: int) -> list[tuple[bool, int]]:
    """Return the order of an all_reduce's frames on each link: the lap of each, and before it
    whether it is a result. It is the order in which they are received, too.
    """
    found: list[tuple[bool, int]] = []
    for lap in range(laps + ahead + 1):
        if lap > ahead:
            found.append((True, lap - ahead - 1))
        if lap < laps:
            found.append((False, lap))
    return found


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp, laps: int, ahead: int) -> None:
    """Reduce ``buffer`` in place.

    A link carries the inputs of laps 0 to ``ahead``, then by turns the result of a lap and the
    input of the one that is as far ahead. A result comes into the place of an input only when its
    sender has that input.
    """
    rank, size = team.rank, team.size
    peers = _peers(team)
    pieces = [cut(buffer, laps, lap, size) for lap in range(laps)]
    results = [chunks[rank] for _, chunks in pieces]
    frames = order(laps, ahead)
    links = [team.link(peer, call) for peer in peers]
    with team.overlap.outbox(call, links) as outbox:
        places = Places(team, results)

        def send_inputs(lap: int) -> None:
            if lap < laps:
                for link, peer in zip(links, peers, strict=True):
                    outbox.post(link, as_bytes(pieces[lap][1][peer]))

        coming = [
            Coming(
                outbox,
                team.link(peer, call),
                [pieces[lap][1][peer] if done else places.of(lap, step) for done, lap in frames],
            )
            for step, peer in enumerate(peers)
        ]
        for lap in range(ahead + 1):
            send_inputs(lap)
        team.overlap.take_over(outbox)
        for done, lap in frames:
            if done:
                for each in coming:
                    each.take()
                continue
            _reduce(team, op, coming, pieces[lap][0][rank], results[lap])
            for link in links:
                outbox.post(link, as_bytes(results[lap]))
            send_inputs(lap + ahead + 1)
            if lap == laps - 1:
                team.overlap.note_all_posted(outbox)


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
    peers = _peers(team)
    links = [team.link(peer, call) for peer in peers]
    bounds = [part_bounds(output.size, laps, lap) for lap in range(laps)]
    results = [output[slice(*each)] for each in bounds]
    with team.overlap.outbox(call, links) as outbox:
        places = Places(team, results)

        def send_inputs(lap: int) -> None:
            if lap < laps:
                for link, peer in zip(links, peers, strict=True):
                    part = inputs[peer]
                    outbox.post(link, as_bytes(part[slice(*part_bounds(part.size, laps, lap))]))

        coming = [
            Coming(outbox, team.link(peer, call), [places.of(lap, step) for lap in range(laps)])
            for step, peer in enumerate(peers)
        ]
        for lap in range(ahead):
            send_inputs(lap)
        team.overlap.take_over(outbox)
        for lap in range(laps):
            send_inputs(lap + ahead)
            if lap + ahead >= laps - 1:
                team.overlap.note_all_posted(outbox)
            _reduce(team, op, coming, (inputs[rank], *bounds[lap]), results[lap])


def swap(
    overlap: Overlap,
    call: Call,
    onward: Sequence[Link],
    sent: Sequence[memoryview],
    behind: Sequence[Link],
    arriving: Sequence[memoryview],
) -> None:
    """Send ``sent[i]`` on ``onward[i]`` and receive ``arriving[i]`` from ``behind[i]``."""
    with overlap.outbox(call, onward) as outbox:
        for link, into in zip(behind, arriving, strict=True):
            outbox.expect(link, into)
        for link, data in zip(onward, sent, strict=True):
            outbox.post(link, data)
        overlap.take_over(outbox)
        overlap.note_all_posted(outbox)
        for link in behind:
            outbox.wait(link)


def cut(buffer: Flat, laps: int, lap: int, size: int) -> tuple[list[Part], list[Flat]]:
    """Return what of ``buffer`` each member reduces in one of ``laps`` laps, in both ways.

    Who reduces an element does not depend on the laps.
    """
    parts: list[Part] = []
    for member in range(size):
        start, stop = part_bounds(buffer.size, size, member)
        low, high = part_bounds(stop - start, laps, lap)
        parts.append((buffer, start + low, start + high))
    return parts, [buffer[low:high] for _, low, high in parts]


def _peers(team: Team) -> list[int]:
    """Return the other members, in the order in which their contributions are added."""
    return [peer for peer, _ in arrivals(team.rank, team.size)]


def _reduce(team: Team, op: ReduceOp, coming: Sequence[Coming], own: Part, result: Flat) -> None:
    """Reduce this rank's ``own`` part of a lap and what comes for it from all into ``result``."""
    partial = Partial(team, op, own, result)
    for each in coming:
        _, on_piece = partial.expect_next(each.next)
        each.take(on_piece)
        partial.add()
    partial.finish()
