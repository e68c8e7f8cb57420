"""Reductions whose frames are encoded: fewer bytes for less precision, the same bits everywhere.

As in ``pairwise``, each member reduces one part. It gets the others' contributions encoded, adds
them in float32 to its own, which nobody has rounded, encodes the sum once and sends that to all;
what it keeps itself is what they decode. So each contribution is rounded once, the result once
more, and all have the same bits. On the wire are (n - 1) / n of the encoded array each way, twice.

With error feedback (``error_feedback``) a member keeps, for each element, what its roundings took
away: of its contributions to others' parts, and of the sum of its own part, of which it is the one
who knows. All that is added to its contributions of the next call, so nothing is lost but delayed:
the results of all calls and the residuals of all members add up to the inputs. Where a result is no
number, every member keeps what it had: a loss scaler skips that step. After Tang et al.,
"DoubleSqueeze", arXiv:1905.05957, with one residual in the place of their two.

Encoded frames are memory of their own: as much as is under way, at most what the array takes
encoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from transport._algorithms.pairwise import Chunks, Places, cut
from transport._algorithms.team import Team
from transport._call import Call
from transport._link import Request
from transport._operands.compression import Compression
from transport._operands.encoding import ENCODINGS, Coder, Floats
from transport._operands.flat import as_bytes, laps_of, part_bounds
from transport._operands.operand import ENCODED, TOTAL, store
from transport._operands.order import Fold, arrivals, merges_in
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp

LEAST_BYTES = 64 << 10
"""Arrays of fewer bytes travel as they are: they cost round trips, and hardly any bytes."""

_F32 = np.dtype(np.float32)
_U8 = np.dtype(np.uint8)
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
    work.run()
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
    counts = [
        stop - start for start, stop in (part_bounds(output.size, laps, i) for i in range(laps))
    ]

    def part(lap: int, member: int) -> Flat:
        return inputs[member][slice(*part_bounds(inputs[member].size, laps, lap))]

    for lap in work.begin(counts, lambda lap, peer: work.coder.encode(part(lap, peer)), 1):
        total = work.total(part(lap, rank))
        work.add_all(lap, total)
        op.finish(total, size)
        store(output[slice(*part_bounds(output.size, laps, lap))], total)
    work.chunks.finish(())


class _Work:
    """What one reduction works with: ``peers`` are the other members, in the order in which their
    contributions are added.
    """

    chunks: Chunks

    def __init__(self, team: Team, call: Call, op: ReduceOp, compression: Compression) -> None:
        self.coder = Coder(ENCODINGS[compression.format], team.scratch)
        self.peers = [peer for peer, _ in arrivals(team.rank, team.size)]
        self._team = team
        self._op = op
        self._call = call

    def begin(
        self, counts: Sequence[int], encoded: Callable[[int, int], Flat], frames: int
    ) -> Iterator[int]:
        """Yield each lap when it is to be reduced. This rank's part of lap i has ``counts[i]``
        numbers, and ``frames`` times as much moves to each peer; ``encoded(lap, peer)`` is what it
        has for one.
        """
        sizes = [self.coder.nbytes(count) for count in counts]
        team, peers = self._team, self.peers
        self._places = places = Places(team.scratch, ENCODED, _U8, max(sizes), len(peers))
        self._sizes = sizes
        self.chunks = Chunks(team, self._call, len(counts), peers, frames * places.nbytes)
        return self.chunks.begin(
            lambda lap: [as_bytes(encoded(lap, peer)) for peer in peers],
            lambda lap: places.of(lap, sizes[lap]),
        )

    def total(self, own: Flat) -> Floats:
        """Return ``own`` as the beginning of a sum."""
        total = self._team.scratch.flat(TOTAL, _F32, own.size)
        np.copyto(total, own, casting="unsafe")
        return total

    def add_all(self, lap: int, total: Floats) -> None:
        """Add the others' contributions of a lap to ``total``, in the order of the peers."""
        team = self._team
        merges = merges_in(team.rank, team.size)
        adding = Fold(team.scratch, self._op.plain, merges, total, total, team.table.piece)
        places = self._places.of(lap, self._sizes[lap])
        for place, request in zip(places, self.chunks.arrived(), strict=True):
            request.wait()
            into, _ = adding.expect(_F32)
            self.coder.decode(place, into)
            adding.add()


class _AllReduce(_Work):
    """One all_reduce of ``buffer``, which is cut into ``laps``, and these into parts."""

    def __init__(
        self, team: Team, call: Call, buffer: Flat, op: ReduceOp, compression: Compression
    ) -> None:
        super().__init__(team, call, op, compression)
        self._count = laps_of(4 * buffer.size, team.table.segment * team.size)
        self._buffer = buffer
        self._kept = op.residual
        self._residual = None if op.residual is None else op.residual.copy()
        self._rank = team.rank
        self._divisor = float(team.size) if op.kind is RedOpType.AVG else 1.0
        self._parts = [cut(buffer, self._count, lap, team.size) for lap in range(self._count)]

    def run(self) -> None:
        """Reduce all laps, and decode the others' results as they come."""
        peers, awaited = self.peers, deque[tuple[Request, Flat, Flat]]()
        counts = [self._part(lap, self._rank)[0].size for lap in range(self._count)]
        for lap in self.begin(counts, self._encoded, 2):
            parts = [self._part(lap, peer)[0] for peer in peers]
            places = [np.empty(self.coder.nbytes(part.size), _U8) for part in parts]
            requests = self.chunks.expect_results(lap, places)
            awaited.extend(zip(requests, places, parts, strict=True))
            total = self._own(lap)
            self.add_all(lap, total)
            self.chunks.send_result(lap, self._settle(lap, total))
            while awaited and awaited[0][0].done:
                self._take(*awaited.popleft())
        while awaited:
            self._take(*awaited.popleft())
        self.chunks.finish(())

    def _take(self, request: Request, encoded: Flat, into: Flat) -> None:
        request.wait()
        self.coder.decode(encoded, into)

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
