"""Pairwise exchanges: every rank sends to, and receives from, every other rank.

Copies are sent to rank + s and received from rank - s, for s = 1, 2, …. Reductions add the inputs
of rank ^ d, for d = 1, 2, …, in the order of addition (``transport._operands.order``).

A frame is sent as soon as its data is available, so a slow rank delays the others only at the end.
A reduction sends inputs, not partial sums. Floats of 8 and 16 bits are therefore sent unchanged,
and the receiver widens them. The price is a connection to every member.

A reduction is cut into chunks, each with an input and a result for each member. Inputs of later
chunks are sent ahead of the results of earlier chunks: one chunk ahead, or as many chunks as fill
the window of a distant peer's link. Tags identify the frames, so each member may send ahead by a
different number of chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from transport._algorithms.team import Team
from transport._calls.call import Call
from transport._link import Request
from transport._operands.flat import Scratch, as_bytes, part_bounds, segments_of
from transport._operands.operand import ARRIVING, TOTAL, Operand, scale, store
from transport._operands.order import StreamingReduction, arrivals
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype

AWAITED = 2
"""The number of inputs of one member in scratch memory: one being reduced, the others arriving."""

Part = tuple[Flat, int, int]
"""Elements ``[1]`` to ``[2]`` of a buffer."""


def all_to_all(
    team: Team, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]
) -> list[Request]:
    """Copy ``inputs[j]`` of member i into ``outputs[i]`` of member j. All sizes may differ."""
    rank, size = team.rank, team.size
    store(outputs[rank], inputs[rank])
    targets = [(rank + step) % size for step in range(1, size)]
    return swap(team, call, targets, inputs, outputs)


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> list[Request]:
    """Send ``outputs[rank]``, which is already in place, to all members. Sizes may differ.

    Like the other functions of this module, returns the requests that the caller must wait for.
    """
    rank, size = team.rank, team.size
    targets = [(rank + step) % size for step in range(1, size)]
    return swap(team, call, targets, [outputs[rank]] * size, outputs)


def swap(
    team: Team, call: Call, peers: Sequence[int], inputs: Sequence[Flat], outputs: Sequence[Flat]
) -> list[Request]:
    """Send ``inputs[peer]`` to each of ``peers``, and receive ``outputs[peer]`` from each."""
    links = [team.link(peer, call) for peer in peers]
    requests: list[Request] = [
        link.post_recv(call, as_bytes(outputs[peer]))
        for link, peer in zip(reversed(links), reversed(peers), strict=True)
    ]
    requests += [
        link.post_send(call, as_bytes(inputs[peer]))
        for link, peer in zip(links, peers, strict=True)
    ]
    return requests


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> list[Request]:
    """Reduce ``buffer`` in place. For PREMUL_SUM, the caller has scaled the input already, unless
    its reduction dtype is wider: scaling must not round.
    """
    wide = reduction_dtype(buffer.dtype).itemsize
    chunks = segments_of(-(-buffer.size // team.size) * wide, team.table.segment)
    parts = [cut(buffer, chunks, chunk, team.size) for chunk in range(chunks)]
    results = [[buffer[start:stop] for _, start, stop in each] for each in parts]
    return _reduce(team, call, op, parts, [each[team.rank] for each in results], results)


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> list[Request]:
    """Reduce ``inputs[i]`` to member i's ``output``. Sizes may differ; inputs are not changed."""
    wide = reduction_dtype(output.dtype).itemsize
    chunks = segments_of(max(part.size for part in inputs) * wide, team.table.segment)
    parts = [
        [(part, *part_bounds(part.size, chunks, chunk)) for part in inputs]
        for chunk in range(chunks)
    ]
    results = [output[slice(*part_bounds(output.size, chunks, chunk))] for chunk in range(chunks)]
    return _reduce(team, call, op, parts, results, None)


def cut(buffer: Flat, chunks: int, chunk: int, size: int) -> list[Part]:
    """Return the part of ``buffer`` that each member reduces in chunk ``chunk`` of ``chunks``.

    The member that reduces an element does not depend on ``chunks``.
    """
    parts: list[Part] = []
    for member in range(size):
        start, stop = part_bounds(buffer.size, size, member)
        low, high = part_bounds(stop - start, chunks, chunk)
        parts.append((buffer, start + low, start + high))
    return parts


def _reduce(
    team: Team,
    call: Call,
    op: ReduceOp,
    parts: Sequence[Sequence[Part]],
    results: Sequence[Flat],
    gathered: Sequence[Sequence[Flat]] | None,
) -> list[Request]:
    """Reduce the members' ``parts[chunk][rank]`` to this rank's ``results[chunk]``.

    With ``gathered``, all members' results of a chunk are received into ``gathered[chunk]``.
    """
    rank, size, scratch = team.rank, team.size, team.scratch
    peers, merges = arrivals(rank, size)
    operand = Operand(scratch, op, results[0].dtype, TOTAL)
    # The sender scales its input by its own factor, and sends it in the dtype used for scaling.
    scaled = op.kind is RedOpType.PREMUL_SUM
    arriving = operand.dtype if scaled else results[0].dtype
    longest, ahead = max(each.size for each in results), min(len(results), AWAITED)
    places = Places(scratch, ARRIVING, arriving, longest, len(peers), ahead)

    def inputs(chunk: int) -> list[memoryview]:
        return [as_bytes(_sent_form(op, parts[chunk][peer], scaled)) for peer in peers]

    def reduce(chunk: int, arrived: Sequence[Request]) -> Flat:
        result = results[chunk]
        own = operand.load(*parts[chunk][rank])
        total = result if own.dtype == result.dtype else own
        adding = StreamingReduction(scratch, op, merges, own, total, team.table.piece)
        for place, request in zip(places.of(chunk, result.size), arrived, strict=True):
            request.wait(adding.expect(arriving, place)[1])
            adding.add()
        op.finish(total, size)
        if total is not result:
            store(result, total)
        return result

    chunks = Chunks(team, call, len(results), peers, 2 * places.nbytes)
    awaited: list[Request] = []
    for chunk in chunks.begin(inputs, lambda chunk: places.of(chunk, results[chunk].size)):
        if gathered is not None:
            awaited += chunks.expect_results(chunk, [gathered[chunk][peer] for peer in peers])
        result = reduce(chunk, chunks.arrived())
        if gathered is not None:
            chunks.send_result(chunk, result)
    return [*awaited, *chunks.sent]


def _sent_form(op: ReduceOp, part: Part, scaled: bool) -> Flat:
    """Return a part in the form in which it is sent: scaled if ``scaled``."""
    buffer, start, stop = part
    if not scaled:
        return buffer[start:stop]
    into = np.empty(stop - start, reduction_dtype(buffer.dtype))
    scale(into, buffer, start, stop, op)
    return into


class Places:
    """Scratch memory for the inputs of ``count`` members: ``ahead`` chunks of up to ``longest``
    elements from each.
    """

    def __init__(
        self,
        scratch: Scratch,
        slot: int,
        dtype: np.dtype[np.generic],
        longest: int,
        count: int,
        ahead: int = AWAITED,
    ) -> None:
        self.nbytes: int = longest * dtype.itemsize
        self._longest = longest
        self._count = count
        self._ahead = ahead
        self._memory = scratch.flat(slot, dtype, ahead * count * longest)

    def of(self, chunk: int, size: int) -> list[Flat]:
        """Return the receive buffers for the members' inputs to a chunk, ``size`` elements each."""
        firsts = [
            (self._ahead * i + chunk % self._ahead) * self._longest for i in range(self._count)
        ]
        return [self._memory[first : first + size] for first in firsts]


class Chunks:
    """Posts the frames of a reduction in ``chunks`` chunks. Each chunk sends about ``nbytes`` to
    each of ``peers``.
    """

    def __init__(
        self, team: Team, call: Call, chunks: int, peers: Sequence[int], nbytes: int
    ) -> None:
        self._call = call
        self._chunks = chunks
        self._links = [team.link(peer, call) for peer in peers]
        window = max(link.window for link in self._links)
        self._ahead = min(chunks, max(1, -(-window // max(1, nbytes))))
        self.sent: list[Request] = []
        """All sends posted so far."""
        self._arriving: deque[list[Request]] = deque()

    def begin(
        self,
        inputs: Callable[[int], Sequence[memoryview]],
        places: Callable[[int], Sequence[Flat]],
    ) -> Iterator[int]:
        """Yield each chunk once the caller may reduce it. ``inputs(chunk)`` returns this rank's
        data for each peer; ``places(chunk)`` returns the buffers for the peers' inputs.
        """
        ahead, chunks = self._ahead, self._chunks
        for chunk in range(-1, chunks):
            for later in range(ahead) if chunk < 0 else (chunk + ahead,):
                if later < chunks:
                    self._send(later, inputs(later))
            for later in range(AWAITED - 1) if chunk < 0 else (chunk + AWAITED - 1,):
                if later < chunks:
                    self._arriving.append(self._expect(later, places(later)))
            if chunk >= 0:
                yield chunk
            elif self._call.rest is not None:
                self._call.rest.end_before()

    def arrived(self) -> list[Request]:
        """Return the receives of the peers' inputs to the chunk yielded last."""
        return self._arriving.popleft()

    def expect_results(self, chunk: int, places: Sequence[Flat]) -> list[Request]:
        """Post receives of the peers' results of a chunk. Await them after the last chunk."""
        return self._expect(self._chunks + chunk, places)

    def send_result(self, chunk: int, result: Flat) -> None:
        """Send this rank's result of a chunk to all peers."""
        self._send(self._chunks + chunk, [as_bytes(result)] * len(self._links))

    def _send(self, tag: int, data: Sequence[memoryview]) -> None:
        for link, each in zip(self._links, data, strict=True):
            self.sent.append(link.post_send(self._call, each, tag))

    def _expect(self, tag: int, places: Sequence[Flat]) -> list[Request]:
        return [
            link.post_recv(self._call, as_bytes(place), tag)
            for link, place in zip(self._links, places, strict=True)
        ]
