"""Pairwise exchanges: every rank sends to every other one, and receives from it.

Copies go to rank + s and come from rank - s, for s = 1, 2, …. Reductions add what comes from
rank ^ d, for d = 1, 2, …, in the order of addition (``transport._operands.order``).

Frames leave as soon as their data is there, so a rank that is held up holds up nobody else before
the end. A reduction sends nothing but inputs, so floats of 8 and 16 bits travel as they are and are
widened by the receiver. The price is a connection to every member.

A reduction goes in chunks, each of which has an input and a result for each member. Inputs of later
chunks leave ahead of the results of earlier ones: one chunk, or as many as a distant peer's wire
takes in a round trip. Frames are told apart by their tags, so each member may be ahead by another
number.
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
"""The inputs of a member that may be arriving in scratch memory, while one is reduced."""

Part = tuple[Flat, int, int]
"""Elements ``[1]`` to ``[2]`` of a buffer."""


def all_to_all(
    team: Team, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]
) -> list[Request]:
    """Copy ``inputs[j]`` of member i into ``outputs[i]`` of member j. Sizes may all differ."""
    rank, size = team.rank, team.size
    store(outputs[rank], inputs[rank])
    targets = [(rank + step) % size for step in range(1, size)]
    return swap(team, call, targets, inputs, outputs)


def all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> list[Request]:
    """Send ``outputs[rank]``, which is in place already, to all. Sizes may differ.

    Returns the frames that are left to be waited for, as the other functions here do.
    """
    rank, size = team.rank, team.size
    targets = [(rank + step) % size for step in range(1, size)]
    return swap(team, call, targets, [outputs[rank]] * size, outputs)


def swap(
    team: Team, call: Call, peers: Sequence[int], inputs: Sequence[Flat], outputs: Sequence[Flat]
) -> list[Request]:
    """Send ``inputs[peer]`` to each of ``peers``, and receive ``outputs[peer]`` from it."""
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
    """Reduce ``buffer`` in place. Inputs that are scaled (PREMUL_SUM) must be so already, unless
    their dtype is reduced in a wider one: scaling must not round.
    """
    wide = reduction_dtype(buffer.dtype).itemsize
    chunks = segments_of(-(-buffer.size // team.size) * wide, team.table.segment)
    parts = [cut(buffer, chunks, chunk, team.size) for chunk in range(chunks)]
    results = [[buffer[start:stop] for _, start, stop in each] for each in parts]
    return _reduce(team, call, op, parts, [each[team.rank] for each in results], results)


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> list[Request]:
    """Reduce ``inputs[i]`` to member i's ``output``. Sizes may differ; inputs stay as they were."""
    wide = reduction_dtype(output.dtype).itemsize
    chunks = segments_of(max(part.size for part in inputs) * wide, team.table.segment)
    parts = [
        [(part, *part_bounds(part.size, chunks, chunk)) for part in inputs]
        for chunk in range(chunks)
    ]
    results = [output[slice(*part_bounds(output.size, chunks, chunk))] for chunk in range(chunks)]
    return _reduce(team, call, op, parts, results, None)


def cut(buffer: Flat, chunks: int, chunk: int, size: int) -> list[Part]:
    """Return the part of ``buffer`` that each member reduces in one of ``chunks`` chunks.

    The chunks do not decide which member reduces an element.
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
    """Reduce what the members have for this rank, in each chunk ``parts[chunk][rank]``, to
    ``results[chunk]``. ``gathered[chunk]`` is where all members' results are put, if they are.
    """
    rank, size, scratch = team.rank, team.size, team.scratch
    peers, merges = arrivals(rank, size)
    operand = Operand(scratch, op, results[0].dtype, TOTAL)
    # A scaled input travels in the dtype in which it was scaled: the factor is the sender's.
    scaled = op.kind is RedOpType.PREMUL_SUM
    arriving = operand.dtype if scaled else results[0].dtype
    longest, ahead = max(each.size for each in results), min(len(results), AWAITED)
    places = Places(scratch, ARRIVING, arriving, longest, len(peers), ahead)

    def inputs(chunk: int) -> list[memoryview]:
        return [as_bytes(_travelling(op, parts[chunk][peer], scaled)) for peer in peers]

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


def _travelling(op: ReduceOp, part: Part, scaled: bool) -> Flat:
    """Return a part as it travels to the member that it is for."""
    buffer, start, stop = part
    if not scaled:
        return buffer[start:stop]
    into = np.empty(stop - start, reduction_dtype(buffer.dtype))
    scale(into, buffer, start, stop, op)
    return into


class Places:
    """Scratch memory for the inputs of ``count`` members, ``ahead`` chunks of ``longest`` elements
    at a time.
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
        self._room = scratch.flat(slot, dtype, ahead * count * longest)

    def of(self, chunk: int, size: int) -> list[Flat]:
        """Return where the members' inputs of a chunk, of ``size`` elements, are received."""
        firsts = [
            (self._ahead * i + chunk % self._ahead) * self._longest for i in range(self._count)
        ]
        return [self._room[first : first + size] for first in firsts]


class Chunks:
    """Posts the frames of a reduction in ``chunks`` chunks, each of which moves about ``nbytes`` to
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
        """Everything that was posted to leave."""
        self._arriving: deque[list[Request]] = deque()

    def begin(
        self,
        inputs: Callable[[int], Sequence[memoryview]],
        places: Callable[[int], Sequence[Flat]],
    ) -> Iterator[int]:
        """Yield each chunk when it is to be reduced. ``inputs(chunk)`` is what this rank has for
        the peers, ``places(chunk)`` where their inputs are received.
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
        """Return the inputs of the chunk that is reduced."""
        return self._arriving.popleft()

    def expect_results(self, chunk: int, places: Sequence[Flat]) -> list[Request]:
        """Receive the peers' results of a chunk; they are waited for behind the last chunk."""
        return self._expect(self._chunks + chunk, places)

    def send_result(self, chunk: int, result: Flat) -> None:
        """Send all peers this rank's result of a chunk."""
        self._send(self._chunks + chunk, [as_bytes(result)] * len(self._links))

    def _send(self, tag: int, data: Sequence[memoryview]) -> None:
        for link, each in zip(self._links, data, strict=True):
            self.sent.append(link.post_send(self._call, each, tag))

    def _expect(self, tag: int, places: Sequence[Flat]) -> list[Request]:
        return [
            link.post_recv(self._call, as_bytes(place), tag)
            for link, place in zip(self._links, places, strict=True)
        ]
