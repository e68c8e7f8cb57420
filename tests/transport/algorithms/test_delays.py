"""How often a collective's longest path crosses the wire: the cost model against a simulation.

Each rank has a clock of delays: a frame arrives one later than it was sent, and whoever receives it
is at least as late. Nothing else takes time. So the latest rank's clock at the end is the number of
delays on the longest path, whatever the threads' scheduler does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_links import FarInprocCommunicator, FarLink, far
from rank_threads import Member, Transport, run_group

from transport.call import Call, Kind
from transport.choosing.choice import DEFAULT, Thresholds
from transport.choosing.cost import work_of
from transport.link import Link, OnPiece
from transport.operands.reduce_op import ReduceOp


class Clocks:
    """By rank, the delays so far; by (sender, receiver), when frames under way were sent."""

    def __init__(self) -> None:
        self.now: dict[int, int] = defaultdict(int)
        self.sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)


class ClockedLink(FarLink):
    """Stamps what it sends before the frame leaves, so that who has the frame finds the stamp."""

    clocks: Clocks
    own: int

    def _stamp(self) -> None:
        self.clocks.sent[self.own, self.peer].append(self.clocks.now[self.own])

    def _read(self) -> None:
        arrived = self.clocks.sent[self.peer, self.own].popleft() + 1
        self.clocks.now[self.own] = max(self.clocks.now[self.own], arrived)

    def send(self, call: Call, data: memoryview) -> None:
        self._stamp()
        super().send(call, data)

    def recv_into(self, call: Call, into: memoryview) -> None:
        super().recv_into(call, into)
        self._read()

    def exchange(
        self,
        call: Call,
        data: memoryview,
        source: Link,
        into: memoryview,
        on_piece: OnPiece | None = None,
    ) -> None:
        assert isinstance(source, ClockedLink)
        self._stamp()
        super().exchange(call, data, source, into, on_piece)
        source._read()

    def lend(self, call: Call, data: memoryview) -> Any:
        self._stamp()
        return super().lend(call, data)

    def take(self, call: Call, into: memoryview, on_piece: OnPiece | None) -> None:
        super().take(call, into, on_piece)
        self._read()


def delays(kind: Kind, nbytes: int, size: int, table: Thresholds) -> int:
    """The delays of the second such call: by then, members have agreed on how far ahead to send."""
    clocks = Clocks()
    count = nbytes // 4

    class Clocked(FarInprocCommunicator):
        def link(self, peer: int, call: Call) -> Any:
            link = self._links.get(peer)
            if link is None:
                link = self._links[peer] = ClockedLink(self, peer)
                link.given, link.log = far(1 << 30), self.log
                link.clocks, link.own = clocks, self.rank
            return link

    def make(membership: Any, table: Thresholds) -> Clocked:
        return Clocked(membership, table, None)

    def body(m: Member) -> int:
        comm: Any = m.comm
        for _ in range(3):  # the first two agree, each with frames of their own
            m.barrier()
            m.barrier()
            clocks.now[m.rank] = 0
            _make(kind, comm, m, count)
        return clocks.now[m.rank]

    return max(run_group(Transport("clocked", make), size, body, table))


def _make(kind: Kind, comm: Any, m: Member, count: int) -> None:
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


KINDS = [
    Kind.BARRIER,
    Kind.BROADCAST,
    Kind.ALL_REDUCE,
    Kind.REDUCE,
    Kind.ALL_GATHER,
    Kind.REDUCE_SCATTER,
    Kind.ALL_TO_ALL,
]


@pytest.mark.parametrize("size", [2, 3, 4, 13, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_small_calls(kind: Kind, size: int) -> None:
    nbytes = 4 * size
    assert delays(kind, nbytes, size, DEFAULT) == work_of(kind, nbytes, size, DEFAULT).delays


# Thresholds and segment a thousandth of their size, for arrays that are.
LARGE = Thresholds(
    star=16,
    all_reduce_doubling=256,
    reduce_scatter_doubling=4,
    all_gather_doubling=16,
    broadcast_tree=128,
    reduce_tree=128,
    segment=512,
    frame=64,
)


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_large_calls(kind: Kind, size: int) -> None:
    nbytes = 2 * 512 * size
    assert delays(kind, nbytes, size, LARGE) == work_of(kind, nbytes, size, LARGE).delays


def test_the_table_of_the_docs() -> None:
    rows = ["| collective | 2 | 4 | 8 | 16 | 32 | 64 |", "|---|---:|---:|---:|---:|---:|---:|"]
    for kind in KINDS:
        for text, nbytes in (("8 B", 8), ("64 MiB", 64 << 20)):
            if kind is Kind.BARRIER and nbytes > 8:
                continue
            shown = "barrier" if kind is Kind.BARRIER else f"{kind.name.lower()}, {text}"
            found = [work_of(kind, nbytes, 1 << k, DEFAULT).delays for k in range(1, 7)]
            rows.append(f"| {shown} | {' | '.join(map(str, found))} |")
    page = Path(__file__).parents[3] / "docs" / "algorithms.md"
    assert "\n".join(rows) in page.read_text()
