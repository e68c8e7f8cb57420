"""Reductions with encoded frames: fewer bytes, less precision, the same bits on all members.

As in ``pairwise``, each member reduces one part. It adds the other members' encoded contributions
in float32 to its own, which is not rounded. It encodes the sum once, sends it to all members and
keeps the decoded sum. So each contribution is rounded once, the result once more, and all members
have the same bits. Each member sends 2 (n - 1) / n of the encoded array's size.

With error feedback (``error_feedback``), a member stores a residual for each element: the rounding
errors of its contributions and of the sum of its own part. It adds the residual to its contribution
in the next call. Errors are thus delayed, not lost: the results of all calls and the residuals of
all members add up to the inputs. Where a result is not finite, all members keep the old residual,
because a loss scaler skips that step. After Tang et al., "DoubleSqueeze", arXiv:1905.05957, with
one residual instead of two.

Encoded frames need extra memory, at most the size of the encoded array.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from transport._algorithms.pairwise import Chunks, Places, cut
from transport._algorithms.team import Team
from transport._calls.call import Call
from transport._link import Request, wait_all
from transport._operands.compression import Compression
from transport._operands.encoding import ENCODINGS, Coder, Floats
from transport._operands.flat import as_bytes, part_bounds, segments_of
from transport._operands.operand import ENCODED, TOTAL, store
from transport._operands.order import StreamingReduction, arrivals
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp

LEAST_BYTES = 64 << 10
"""Smaller arrays are sent uncompressed, because latency dominates their cost."""

_F32 = np.dtype(np.float32)
_U8 = np.dtype(np.uint8)
_SUMS = (RedOpType.SUM, RedOpType.AVG)


def compresses(
    compression: Compression, nbytes: int, dtype: np.dtype[np.generic], op: ReduceOp
) -> bool:
    """Return whether a reduction of ``nbytes`` of ``dtype`` is sent encoded: SUM or AVG of floats
    wider than the encoding. The result is the same on all members.
    """
    if op.kind not in _SUMS or nbytes < LEAST_BYTES:
        return False
    floating = dtype.kind in "fV" and dtype.itemsize <= 8
    return floating and dtype.itemsize > ENCODINGS[compression.format].dtype.itemsize


def all_reduce(
    team: Team, call: Call, buffer: Flat, op: ReduceOp, compression: Compression
) -> None:
    """Reduce ``buffer`` in place, by SUM or AVG."""
    work = _CompressedAllReduce(team, call, buffer, op, compression)
    work.run()
    work.store_residual()


def reduce_scatter(
    team: Team,
    call: Call,
    output: Flat,
    inputs: Sequence[Flat],
    op: ReduceOp,
    compression: Compression,
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``, by SUM or AVG. Sizes may differ; the inputs
    are not changed. Contributions are rounded once; the result is not rounded.
    """
    work = _CompressedReduction(team, call, op, compression)
    rank, size = team.rank, team.size
    longest = max(part.size for part in inputs)
    count = segments_of(4 * longest, team.table.segment)
    counts = [
        stop - start for start, stop in (part_bounds(output.size, count, i) for i in range(count))
    ]

    def part(chunk: int, member: int) -> Flat:
        return inputs[member][slice(*part_bounds(inputs[member].size, count, chunk))]

    for chunk in work.begin(counts, lambda chunk, peer: work.coder.encode(part(chunk, peer)), 1):
        total = work.total(part(chunk, rank))
        work.add_all(chunk, total)
        op.finish(total, size)
        store(output[slice(*part_bounds(output.size, count, chunk))], total)
    wait_all(work.chunks.sent)


class _CompressedReduction:
    """One compressed reduction. ``peers`` are the other members, in the order of addition."""

    chunks: Chunks

    def __init__(self, team: Team, call: Call, op: ReduceOp, compression: Compression) -> None:
        self.coder = Coder(ENCODINGS[compression.format], team.scratch)
        self.peers, self._merges = arrivals(team.rank, team.size)
        self._team = team
        self._op = op
        self._call = call

    def begin(
        self, counts: Sequence[int], encoded: Callable[[int, int], Flat], frames: int
    ) -> Iterator[int]:
        """Yield each chunk once the caller may reduce it. This rank's part of chunk i has
        ``counts[i]`` elements. ``encoded(chunk, peer)`` returns this rank's contribution to a
        peer's part. The call sends ``frames`` frames of that size to each peer.
        """
        sizes = [self.coder.nbytes(count) for count in counts]
        team, peers = self._team, self.peers
        self._places = places = Places(team.scratch, ENCODED, _U8, max(sizes), len(peers))
        self._sizes = sizes
        self.chunks = Chunks(team, self._call, len(counts), peers, frames * places.nbytes)
        return self.chunks.begin(
            lambda chunk: [as_bytes(encoded(chunk, peer)) for peer in peers],
            lambda chunk: places.of(chunk, sizes[chunk]),
        )

    def total(self, own: Flat) -> Floats:
        """Copy ``own`` into float32 scratch memory, as the initial value of a sum."""
        total = self._team.scratch.flat(TOTAL, _F32, own.size)
        np.copyto(total, own, casting="unsafe")
        return total

    def add_all(self, chunk: int, total: Floats) -> None:
        """Add the peers' contributions to a chunk to ``total``, in the order of ``peers``."""
        team = self._team
        adding = StreamingReduction(
            team.scratch, self._op.plain, self._merges, total, total, team.table.piece
        )
        places = self._places.of(chunk, self._sizes[chunk])
        for place, request in zip(places, self.chunks.arrived(), strict=True):
            request.wait()
            into, _ = adding.expect(_F32)
            self.coder.decode(place, into)
            adding.add()


class _CompressedAllReduce(_CompressedReduction):
    """One all_reduce of ``buffer``, which is cut into chunks, and each chunk into parts."""

    def __init__(
        self, team: Team, call: Call, buffer: Flat, op: ReduceOp, compression: Compression
    ) -> None:
        super().__init__(team, call, op, compression)
        self._count = segments_of(4 * buffer.size, team.table.segment * team.size)
        self._buffer = buffer
        self._stored_residual = op.residual
        self._residual = None if op.residual is None else op.residual.copy()
        self._rank = team.rank
        self._divisor = float(team.size) if op.kind is RedOpType.AVG else 1.0
        self._parts = [cut(buffer, self._count, chunk, team.size) for chunk in range(self._count)]

    def run(self) -> None:
        """Reduce all chunks, and decode the peers' results as they arrive."""
        peers, awaited = self.peers, deque[tuple[Request, Flat, Flat]]()
        counts = [self._part(chunk, self._rank)[0].size for chunk in range(self._count)]
        for chunk in self.begin(counts, self._encoded, 2):
            parts = [self._part(chunk, peer)[0] for peer in peers]
            places = [np.empty(self.coder.nbytes(part.size), _U8) for part in parts]
            requests = self.chunks.expect_results(chunk, places)
            awaited.extend(zip(requests, places, parts, strict=True))
            total = self._own_total(chunk)
            self.add_all(chunk, total)
            self.chunks.send_result(chunk, self._encode_result(chunk, total))
            while awaited and awaited[0][0].done:
                self._decode_result(*awaited.popleft())
        while awaited:
            self._decode_result(*awaited.popleft())
        wait_all(self.chunks.sent)

    def _decode_result(self, request: Request, encoded: Flat, into: Flat) -> None:
        request.wait()
        self.coder.decode(encoded, into)

    def store_residual(self) -> None:
        """Store the new residual for the next call, where the result is finite."""
        if self._stored_residual is not None and self._residual is not None:
            np.copyto(self._stored_residual, self._residual, where=np.isfinite(self._buffer))

    def _part(self, chunk: int, member: int) -> tuple[Flat, Floats | None]:
        """Return the part of a chunk that a member reduces, and its residual."""
        buffer, start, stop = self._parts[chunk][member]
        residual = self._residual
        return buffer[start:stop], None if residual is None else residual[start:stop]

    def _encoded(self, chunk: int, peer: int) -> Flat:
        return self.coder.encode(*self._part(chunk, peer))

    def _own_total(self, chunk: int) -> Floats:
        part, residual = self._part(chunk, self._rank)
        total = self.total(part)
        if residual is not None:
            total += residual
        return total

    def _encode_result(self, chunk: int, total: Floats) -> Flat:
        """Return the encoded result of this rank's part, after storing it decoded in ``buffer``."""
        part, residual = self._part(chunk, self._rank)
        if self._divisor != 1.0:
            total /= np.float32(self._divisor)
        # The residual is added to a sum, so the average's rounding error is scaled back.
        return self.coder.encode_sum(total, part, residual, self._divisor)
