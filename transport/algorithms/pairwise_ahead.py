"""Pairwise exchanges on links with delay: what is to be sent leaves before what comes is there.

The bits are those of ``pairwise``, as are the frames on each link; their order is another one. An
input is sent as soon as the link has room for it, so many laps ahead of those that are reduced that
the wire is never idle. Results follow as they are ready. What is sent ahead is kept nowhere: inputs
leave from the caller's memory. All peers are received from at the same time, a segment of each in
memory of its own, and reduced in the order of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.partial import Part, Partial
from transport.algorithms.team import Team
from transport.call import Call
from transport.flat import as_bytes, part_bounds
from transport.link import Link, Outbox, PacedLink
from transport.operands.operand import ARRIVING
from transport.reduce_op import Flat, RedOpType, ReduceOp


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
        inputs = _Inputs(team, outbox, behind, [chunks[rank] for _, chunks in pieces], op)

        def send_inputs(lap: int) -> None:
            if lap < laps:
                for link, peer in zip(onward, targets, strict=True):
                    outbox.post(link, as_bytes(pieces[lap][1][peer]))

        def expect_results(link: Link, peer: int, lap: int) -> None:
            """Those that come between the input of ``lap`` and the next."""
            last = lap + 1 if lap == laps - 1 else lap - ahead + 1
            for earlier in range(max(0, lap - ahead), last):
                outbox.expect(link, as_bytes(pieces[earlier][1][peer]))

        inputs.expect_first()
        for lap in range(ahead + 1):
            send_inputs(lap)
        for lap in range(laps):
            if lap > ahead:
                _wait_for_all(outbox, behind)
            partial = inputs.partial(lap, pieces[lap][0][rank])
            for step, (link, peer) in enumerate(zip(behind, sources, strict=True)):
                inputs.add(partial, lap, step)
                expect_results(link, peer, lap)
                inputs.expect(lap + 1, step)
            partial.finish()
            result = as_bytes(pieces[lap][1][rank])
            for link in onward:
                outbox.post(link, result)
            send_inputs(lap + ahead + 1)
        for _ in range(min(laps, ahead + 1)):
            _wait_for_all(outbox, behind)


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
    bounds = [part_bounds(output.size, laps, lap) for lap in range(laps)]
    with _outbox(onward, call) as outbox:
        others = _Inputs(team, outbox, behind, [output[slice(*each)] for each in bounds], op)

        def send_inputs(lap: int) -> None:
            if lap < laps:
                for link, peer in zip(onward, targets, strict=True):
                    part = inputs[peer]
                    outbox.post(link, as_bytes(part[slice(*part_bounds(part.size, laps, lap))]))

        others.expect_first()
        for lap in range(ahead):
            send_inputs(lap)
        for lap in range(laps):
            send_inputs(lap + ahead)
            partial = others.partial(lap, (inputs[rank], *bounds[lap]))
            for step in range(len(behind)):
                others.add(partial, lap, step)
                others.expect(lap + 1, step)
            partial.finish()


def swap(
    call: Call,
    onward: Sequence[Link],
    sent: Sequence[memoryview],
    behind: Sequence[Link],
    arriving: Sequence[memoryview],
) -> None:
    """Send ``sent[i]`` on ``onward[i]`` and receive ``arriving[i]`` from ``behind[i]``."""
    with _outbox(onward, call) as outbox:
        for link, into in zip(behind, arriving, strict=True):
            outbox.expect(link, into)
        for link, data in zip(onward, sent, strict=True):
            outbox.post(link, data)
        _wait_for_all(outbox, behind)


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


def _wait_for_all(outbox: Outbox, links: Sequence[Link]) -> None:
    """Wait for a frame of each link."""
    for link in links:
        outbox.wait(link)


class _Inputs:
    """What the others send for this rank's parts: all of them at once, each into memory of its own,
    a lap at a time. They are reduced in the order of the steps, into the ``results`` of the laps.
    """

    def __init__(
        self,
        team: Team,
        outbox: Outbox,
        behind: Sequence[Link],
        results: Sequence[Flat],
        op: ReduceOp,
    ) -> None:
        self._team = team
        self._outbox = outbox
        self._behind = behind
        self._results = results
        self._op = op
        longest = max(result.size for result in results)
        room = team.scratch.flat(ARRIVING, results[0].dtype, longest * len(behind))
        self._places = [room[i * longest : (i + 1) * longest] for i in range(len(behind))]

    def expect_first(self) -> None:
        for step in range(len(self._behind)):
            self.expect(0, step)

    def expect(self, lap: int, step: int) -> None:
        """Have the input of a lap received, when that of the lap before it has been added."""
        if lap < len(self._results):
            self._outbox.expect(self._behind[step], as_bytes(self._place(lap, step)))

    def partial(self, lap: int, own: Part) -> Partial:
        """Return this rank's ``own`` part of a lap, to which the others' are to be added."""
        return Partial(self._team, self._op, own, self._results[lap])

    def add(self, partial: Partial, lap: int, step: int) -> None:
        """Reduce the input of a lap, while it comes or when it is there."""
        _, on_piece = partial.expect(self._place(lap, step))
        self._outbox.wait(self._behind[step], on_piece)
        partial.add()

    def _place(self, lap: int, step: int) -> Flat:
        return self._places[step][: self._results[lap].size]
