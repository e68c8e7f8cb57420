"""Algorithms for copies, and a barrier.

- A **pipelined chain** passes data from rank to rank in segments, with all links busy at once. Each
  byte crosses each link once, the minimum for n - 1 receivers. Filling the pipeline costs n - 2
  segments.
- **Direct** gather and scatter send straight between the root and each member.
- **Bruck's** all-gather doubles the blocks that a rank holds in each of log2(n) steps, for any n.
  After Bruck et al., "Efficient algorithms for all-to-all communications in multiport
  message-passing systems" (1997).
- A **ring** takes n - 1 steps. In each, a rank sends to the next rank and receives from the
  previous one. It serves only copies, because a sum would be added in ring order.
- The **dissemination** barrier: in step k each rank reports to rank + 2^k all arrivals that it
  knows. After Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988).

Members may have different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from transport._algorithms.team import Team
from transport._calls.call import Call
from transport._link import Request, exchange, wait_all
from transport._operands.flat import as_bytes, part_bounds, segments_of
from transport._operands.operand import TOTAL, store
from transport._operands.reduce_op import Flat


def dissemination_barrier(team: Team, call: Call) -> None:
    """Wait until every member has called. Each rank sends ceil(log2 n) empty frames, for any n."""
    nothing = memoryview(bytearray())
    distance = 1
    while distance < team.size:
        onward = team.link((team.rank + distance) % team.size, call)
        behind = team.link((team.rank - distance) % team.size, call)
        exchange(call, onward, nothing, behind, nothing)
        distance *= 2


def chain_broadcast(team: Team, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` to all members, in segments if there are more than two."""
    size = team.size
    place = (team.rank - root) % size
    behind = team.link((team.rank - 1) % size, call) if place else None
    onward = team.link((team.rank + 1) % size, call) if place < size - 1 else None
    count = segments_of(buffer.nbytes, team.table.segment) if size > 2 else 1
    segments = [as_bytes(buffer[slice(*part_bounds(buffer.size, count, i))]) for i in range(count)]
    arriving: list[Request | None] = [None] * count
    if behind is not None:
        arriving = [behind.post_recv(call, segment) for segment in segments]
    sent: list[Request] = []
    for request, segment in zip(arriving, segments, strict=True):
        if request is not None:
            request.wait()
        if onward is not None:
            sent.append(onward.post_send(call, segment))
    wait_all(sent)


def gather(team: Team, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
    """Copy member i's ``input_`` into ``outputs[i]`` on ``root``; others pass None."""
    if outputs is None:
        team.link(root, call).send(call, as_bytes(input_))
        return
    sources = [(root + step) % team.size for step in range(1, team.size)]
    wait_all([team.link(each, call).post_recv(call, as_bytes(outputs[each])) for each in sources])
    store(outputs[root], input_)


def scatter(team: Team, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
    """Copy ``inputs[i]`` on ``root`` into member i's ``output``; others pass None."""
    if inputs is None:
        team.link(root, call).recv_into(call, as_bytes(output))
        return
    targets = [(root + step) % team.size for step in range(1, team.size)]
    wait_all([team.link(each, call).post_send(call, as_bytes(inputs[each])) for each in targets])
    store(output, inputs[root])


def ring_all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Send ``outputs[rank]``, which is already in place, around the ring to all members."""
    rank, size = team.rank, team.size
    onward, behind = team.link((rank + 1) % size, call), team.link((rank - 1) % size, call)
    blocks = [as_bytes(outputs[(rank - step) % size]) for step in range(size)]
    arriving = [behind.post_recv(call, block) for block in blocks[1:]]
    sent = [onward.post_send(call, blocks[0])]
    for request, block in zip(arriving[:-1], blocks[1:-1], strict=True):
        request.wait()
        sent.append(onward.post_send(call, block))
    wait_all(arriving[-1:])
    wait_all(sent)


def bruck_all_gather(team: Team, call: Call, outputs: Sequence[Flat]) -> None:
    """Send ``outputs[rank]``, which is already in place, to all members.

    Scratch memory holds the blocks in rank order, starting at this rank, so that each step sends
    and receives one contiguous frame.
    """
    rank, size = team.rank, team.size
    members = [(rank + i) % size for i in range(size)]
    ends = [0, *accumulate(outputs[member].size for member in members)]
    packed = team.scratch.flat(TOTAL, outputs[rank].dtype, ends[-1])
    packed[: ends[1]] = outputs[rank]
    distance = 1
    while distance < size:
        blocks = min(distance, size - distance)
        exchange(
            call,
            team.link((rank - distance) % size, call),
            as_bytes(packed[: ends[blocks]]),
            team.link((rank + distance) % size, call),
            as_bytes(packed[ends[distance] : ends[distance + blocks]]),
        )
        distance *= 2
    for i in range(1, size):
        outputs[members[i]][:] = packed[ends[i] : ends[i + 1]]
