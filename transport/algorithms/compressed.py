"""Reductions whose frames are encoded: fewer bytes for less precision, the same bits everywhere.

As ``pairwise``: each member reduces one part. It gets the others' contributions encoded, adds them
in float32 to its own, which nobody has rounded, encodes the sum once and sends that to all; what it
keeps itself is what they decode. So each contribution is rounded once, the result once more, and
all have the same bits. On the wire are (n - 1) / n of the encoded array each way, twice.

With error feedback (``error_feedback``) a member keeps, for each element, what its roundings took
away: of its contributions to others' parts, and of the sum of its own part, of which it is the one
who knows. All that is added to its contributions of the next call, so nothing is lost but delayed:
the results of all calls and the residuals of all members add up to the inputs. Where a result is no
number, every member keeps what it had: a loss scaler skips that step. After Tang et al.,
"DoubleSqueeze", arXiv:1905.05957, with one residual in the place of their two.

On links with delay frames leave ahead of what has been received, as in ``pairwise_ahead``. Encoded
frames are memory of their own: as much as is under way, at most what the array takes encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from transport.algorithms.exchanges.coming import Coming
from transport.algorithms.exchanges.pairwise_ahead import cut, order
from transport.algorithms.team import Team
from transport.call import Call
from transport.link import Link, Outbox, QueuedLink
from transport.operands.compression import Compression
from transport.operands.encoding import ENCODINGS, Coder, Floats
from transport.operands.flat import as_bytes, laps_of, part_bounds
from transport.operands.operand import ENCODED, TOTAL, store
from transport.operands.order import Fold, arrivals, merges_in
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp

LEAST_BYTES = 64 << 10
"""Arrays of fewer bytes travel as they are: they cost round trips, and hardly any bytes."""

_F32 = np.dtype(np.float32)
_U8 = np.dtype(np.uint8)
_Encoded = Callable[[int, int], Flat]
"""Returns what a member (the second) gets of a lap (the first)."""
_SUMS = (RedOpType.SUM, RedOpType.AVG)


def compresses(
    compression: Compression, nbytes: int, dtype: np.dtype[np.generic], op: ReduceOp
) -> bool:
    """Return whether a reduction of ``nbytes`` of ``dtype`` is sent encoded: SUM and AVG of floats
    that are wider than what they are encoded as. The same on all members.
    """
    if op.kind not in _SUMS or nbytes < LEAST_BYTES:
        return False
    floating = dtype.kind in "fV" and dtype.itemsize <= 8
    return floating and dtype.itemsize > ENCODINGS[compression.format].dtype.itemsize


def all_reduce(
    team: Team, call: Call, buffer: Flat, op: ReduceOp, compression: Compression
) -> None:
    """Reduce ``buffer`` in place, by SUM or AVG."""
    work = _AllReduce(team, call, buffer, op, compression)
    frame = work.coder.nbytes(-(-buffer.size // (work.laps * team.size)))
    # In each lap there is an input and a result on a link.
    ahead = _laps_ahead(team, call, 2 * frame)
    if ahead:
        work.run_ahead(ahead)
    else:
        work.run_in_step()
    work.keep()


def reduce_scatter(
    team: Team,
    call: Call,
    output: Flat,
    inputs: Sequence[Flat],
    op: ReduceOp,
    compression: Compression,
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``, by SUM or AVG. Sizes may differ; inputs stay
    as they were. Each contribution is rounded once, the result not at all.
    """
    work = _Work(team, call, op, compression)
    rank, size = team.rank, team.size
    longest = max(part.size for part in inputs)
    laps = laps_of(4 * longest, team.table.segment)

    def encoded(lap: int, peer: int) -> Flat:
        part = inputs[peer]
        return work.coder.encode(part[slice(*part_bounds(part.size, laps, lap))])

    def own(lap: int) -> Floats:
        part = inputs[rank]
        return work.total(part[slice(*part_bounds(part.size, laps, lap))])

    def settle(lap: int, total: Floats) -> None:
        op.finish(total, size)
        store(output[slice(*part_bounds(output.size, laps, lap))], total)

    ahead = _laps_ahead(team, call, work.coder.nbytes(-(-longest // laps)))
    if not ahead:
        for lap in range(laps):
            total = own(lap)
            work.add_in_step(lap, encoded, total)
            settle(lap, total)
        return
    with work.outbox() as outbox:
        bounds = [part_bounds(output.size, laps, lap) for lap in range(laps)]
        counts = [stop - start for start, stop in bounds]
        coming = work.coming(outbox, [counts] * len(work.steps))
        for lap in range(min(ahead, laps)):
            work.post_inputs(outbox, lap, encoded)
        for lap in range(laps):
            if lap + ahead < laps:
                work.post_inputs(outbox, lap + ahead, encoded)
            total = own(lap)
            work.add_all(coming, total)
            settle(lap, total)


class _Work:
    """What one reduction works with: ``steps`` has the other members, and the links to
    them, in the order in which their contributions are added.
    """

    def __init__(self, team: Team, call: Call, op: ReduceOp, compression: Compression) -> None:
        self.coder = Coder(ENCODINGS[compression.format], team.scratch)
        self.steps: list[tuple[Link, int]] = [
            (team.link(peer, call), peer) for peer, _ in arrivals(team.rank, team.size)
        ]
        self._team = team
        self._op = op
        self._scratch = team.scratch
        self.call = call

    def outbox(self) -> Outbox:
        link = self.steps[0][0]
        assert isinstance(link, QueuedLink)
        return link.outbox(self.call)

    def arriving(self, count: int) -> Flat:
        """Return where ``count`` encoded numbers are to be received; valid until the next."""
        return self._scratch.flat(ENCODED, _U8, self.coder.nbytes(count))

    def total(self, own: Flat) -> Floats:
        """Return ``own`` as the beginning of a sum."""
        total = self._scratch.flat(TOTAL, _F32, own.size)
        np.copyto(total, own, casting="unsafe")
        return total

    def coming(self, outbox: Outbox, counts: Sequence[Sequence[int]]) -> list[Coming]:
        """Return what comes from each other member, in the order of the steps: ``counts[i]`` has
        how many numbers each frame from the i-th encodes. From all at once, a few frames of each.
        """
        sizes = [[self.coder.nbytes(count) for count in each] for each in counts]
        longest = max(map(max, sizes))
        room = self._scratch.flat(ENCODED, _U8, len(sizes) * Coming.MOST * longest)
        found: list[Coming] = []
        for step, (link, _) in enumerate(self.steps):
            begins = [
                (step * Coming.MOST + i % Coming.MOST) * longest for i in range(len(sizes[step]))
            ]
            places = [room[i : i + n] for i, n in zip(begins, sizes[step], strict=True)]
            found.append(Coming(outbox, link, places))
        return found

    def add_in_step(self, lap: int, encoded: _Encoded, total: Floats) -> None:
        """Send a lap's inputs, and add the others' contributions to ``total``, by turns."""
        adding = self._fold(total)
        for link, peer in self.steps:
            arrived = self.arriving(total.size)
            link.exchange(self.call, as_bytes(encoded(lap, peer)), link, as_bytes(arrived))
            self._add(adding, arrived)

    def _fold(self, total: Floats) -> Fold:
        team = self._team
        merges = merges_in(team.rank, team.size)
        return Fold(team.scratch, self._op.plain, merges, total, total, team.table.piece)

    def _add(self, adding: Fold, arrived: Flat) -> None:
        into, _ = adding.expect(_F32)
        self.coder.decode(arrived, into)
        adding.add()

    def post_inputs(self, outbox: Outbox, lap: int, encoded: _Encoded) -> None:
        """Send a lap's inputs ahead of what comes."""
        for link, peer in self.steps:
            outbox.post(link, as_bytes(encoded(lap, peer)))

    def add_all(self, coming: Sequence[Coming], total: Floats) -> None:
        """Add the others' contributions to ``total``, in the order of the steps."""
        adding = self._fold(total)
        for each in coming:
            self._add(adding, each.take())


class _AllReduce(_Work):
    """One all_reduce of ``buffer``, which is cut into ``laps``, and these into parts."""

    def __init__(
        self, team: Team, call: Call, buffer: Flat, op: ReduceOp, compression: Compression
    ) -> None:
        super().__init__(team, call, op, compression)
        self.laps = laps_of(4 * buffer.size, team.table.segment * team.size)
        self._buffer = buffer
        self._kept = op.residual
        self._residual = None if op.residual is None else op.residual.copy()
        self._rank = team.rank
        self._divisor = float(team.size) if op.kind is RedOpType.AVG else 1.0
        self._parts = [cut(buffer, self.laps, lap, team.size)[0] for lap in range(self.laps)]

    def run_in_step(self) -> None:
        """Send and receive a frame at a time."""
        for lap in range(self.laps):
            total = self._own(lap)
            self.add_in_step(lap, self._encoded, total)
            result = as_bytes(self._settle(lap, total))
            for link, peer in self.steps:
                into, _ = self._part(lap, peer)
                arrived = self.arriving(into.size)
                link.exchange(self.call, result, link, as_bytes(arrived))
                self.coder.decode(arrived, into)

    def run_ahead(self, ahead: int) -> None:
        """Send inputs ``ahead`` laps before those that are reduced, results as they are ready."""
        frames = order(self.laps, ahead)
        members = [peer for _, peer in self.steps]
        with self.outbox() as outbox:
            counts = [
                [self._part(lap, source if done else self._rank)[0].size for done, lap in frames]
                for source in members
            ]
            coming = self.coming(outbox, counts)
            for lap in range(min(ahead + 1, self.laps)):
                self.post_inputs(outbox, lap, self._encoded)
            for done, lap in frames:
                if done:
                    for each, source in zip(coming, members, strict=True):
                        self.coder.decode(each.take(), self._part(lap, source)[0])
                    continue
                total = self._own(lap)
                self.add_all(coming, total)
                result = as_bytes(self._settle(lap, total))
                for link, _ in self.steps:
                    outbox.post(link, result)
                if lap + ahead + 1 < self.laps:
                    self.post_inputs(outbox, lap + ahead + 1, self._encoded)

    def keep(self) -> None:
        """Leave what was rounded away to the next call, where the result is a number."""
        if self._kept is not None and self._residual is not None:
            np.copyto(self._kept, self._residual, where=np.isfinite(self._buffer))

    def _part(self, lap: int, member: int) -> tuple[Flat, Floats | None]:
        """Return what a member reduces in a lap, and what has been rounded away of it."""
        buffer, start, stop = self._parts[lap][member]
        residual = self._residual
        return buffer[start:stop], None if residual is None else residual[start:stop]

    def _encoded(self, lap: int, peer: int) -> Flat:
        return self.coder.encode(*self._part(lap, peer))

    def _own(self, lap: int) -> Floats:
        part, residual = self._part(lap, self._rank)
        total = self.total(part)
        if residual is not None:
            total += residual
        return total

    def _settle(self, lap: int, total: Floats) -> Flat:
        """Return the encoded result of this rank's part, which is in its place then."""
        part, residual = self._part(lap, self._rank)
        if self._divisor != 1.0:
            total /= np.float32(self._divisor)
        # What is kept is a part of the sum.
        return self.coder.encode_sum(total, part, residual, self._divisor)


def _laps_ahead(team: Team, call: Call, nbytes: int) -> int:
    """Return by how many laps, with ``nbytes`` each on a link, inputs are to be sent ahead."""
    under_way = team.ahead(call)
    return -(-under_way // nbytes)
