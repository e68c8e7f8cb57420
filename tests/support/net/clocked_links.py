"""Links with clocks of delays, by which the length of a call's longest path is counted.

Each rank has a clock of delays: a frame arrives one later than it was sent, and whoever receives it
is at least as late. Nothing else takes time. So the latest rank's clock at the end is the number of
delays on the longest path, whatever the threads' scheduler does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.net.far_links import FarInprocCommunicator, FarLink
from tests.support.transport.rank_threads import Member
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._operands.reduce_op import ReduceOp

KINDS = [
    Kind.BARRIER,
    Kind.BROADCAST,
    Kind.ALL_REDUCE,
    Kind.REDUCE,
    Kind.ALL_GATHER,
    Kind.REDUCE_SCATTER,
    Kind.ALL_TO_ALL,
]
"""What ``make_call`` can make."""


class Clocks:
    """By rank, the delays so far; by sender, receiver, call and tag, when frames under way were
    sent.

    ``weigh(sender, receiver)`` is how long a frame between them takes.
    """

    def __init__(self, weigh: Callable[[int, int], int] = lambda _sender, _receiver: 1) -> None:
        self.weigh = weigh
        self.now: dict[int, int] = defaultdict(int)
        self.sent: dict[tuple[int, int, bytes, int], deque[int]] = defaultdict(deque)


class ClockedLink(FarLink):
    """Stamps what it sends before the frame leaves, so that who has the frame finds the stamp."""

    clocks: Clocks
    own: int

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> Any:
        sent = self.clocks.sent[self.own, self.peer, call.packed, tag]
        sent.append(self.clocks.now[self.own])
        return super().post_send(call, data, tag)

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> Any:
        request: Any = super().post_recv(call, into, tag)
        request.on_done = lambda: self._read((self.peer, self.own, call.packed, tag))
        return request

    def _read(self, key: tuple[int, int, bytes, int]) -> None:
        arrived = self.clocks.sent[key].popleft()
        arrived += self.clocks.weigh(self.peer, self.own)
        self.clocks.now[self.own] = max(self.clocks.now[self.own], arrived)


class Clocked(FarInprocCommunicator):
    """Threads over such links, which all send ahead."""

    def __init__(self, membership: Any, table: Any, clocks: Clocks) -> None:
        super().__init__(membership, table, None)
        self.clocks = clocks

    def link(self, peer: int, call: Call) -> Any:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = ClockedLink(self, peer)
            link.window, link.log = 1 << 30, self.log
            link.clocks, link.own = self.clocks, self.rank
        return link


def delays_of(m: Member, kind: Kind, count: int, clocks: Clocks) -> int:
    """Return the clock of this rank behind such a call, where all began at 0: the third, as the
    first two agree, each with frames of their own.
    """
    for _ in range(3):
        m.barrier()
        m.barrier()
        clocks.now[m.rank] = 0
        make_call(kind, m.comm, m, count)
    return clocks.now[m.rank]


def make_call(kind: Kind, comm: Any, m: Member, count: int) -> None:
    """Make a call of ``kind`` on ``count`` float32, with the root 0."""
    f32 = np.dtype(np.float32)
    call = m.call(kind, f32, root=0 if kind in (Kind.BROADCAST, Kind.REDUCE) else -1)
    whole = np.ones(count, np.float32)
    part = count // m.size
    parts = [whole[i * part : (i + 1) * part] for i in range(m.size)]
    match kind:
        case Kind.BARRIER:
            comm.barrier(call)
        case Kind.BROADCAST:
            comm.broadcast(call, whole, 0)
        case Kind.ALL_REDUCE:
            comm.all_reduce(call, whole, ReduceOp.SUM)
        case Kind.REDUCE:
            comm.reduce(call, whole, ReduceOp.SUM, 0)
        case Kind.ALL_GATHER:
            outputs = [np.empty(count, np.float32) for _ in range(m.size)]
            comm.all_gather(call, outputs, whole)
        case Kind.REDUCE_SCATTER:
            comm.reduce_scatter(call, np.empty(part, np.float32), parts, ReduceOp.SUM)
        case _:
            outputs = [np.empty(part, np.float32) for _ in range(m.size)]
            comm.all_to_all(call, outputs, parts)
