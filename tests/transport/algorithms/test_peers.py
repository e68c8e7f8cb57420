"""Each algorithm uses links to exactly the peers that it declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import Algorithm, Thresholds
from transport._choosing.peers import peers_of
from transport._inproc.communicator import InprocCommunicator
from transport._operands.reduce_op import ReduceOp

LARGE = Thresholds(
    star=0, star_ranks=0, all_reduce_doubling=0, reduce_scatter_doubling=0, segment=64
)
LARGE = replace(LARGE, all_gather_doubling=0, doubling_ranks=2, frame=0)
SMALL = replace(LARGE, all_reduce_doubling=1 << 20, all_gather_doubling=1 << 20)
CHAIN = replace(LARGE, broadcast_tree=0, reduce_tree=0)
ROOT = 1
RING = replace(LARGE, pairwise_ranks=1)


class Recording(InprocCommunicator):
    """Records its links, and the peers given to ``reach``."""

    def __init__(self, membership: Any, table: Any) -> None:
        super().__init__(membership, table)
        self.used: set[int] = set()
        self.reached: list[list[int]] = []

    def link(self, peer: int, call: Any) -> Any:
        self.used.add(peer)
        return super().link(peer, call)

    def reach(self, peers: Any, call: Any) -> None:
        self.reached.append(list(peers))


def all_gather(m: Member) -> None:
    outputs = [np.zeros(40, np.float32) for _ in range(m.size)]
    m.comm.all_gather(m.call(Kind.ALL_GATHER, np.float32), outputs, outputs[m.rank])


def all_reduce(m: Member) -> None:
    m.all_reduce(np.ones(400, np.float32), ReduceOp.SUM)


def broadcast(m: Member) -> None:
    call = m.call(Kind.BROADCAST, np.float32, 400, root=ROOT)
    m.comm.broadcast(call, np.ones(400, np.float32), ROOT)


def reduce(m: Member) -> None:
    call = m.call(Kind.REDUCE, np.float32, 400, ReduceOp.SUM, ROOT)
    m.comm.reduce(call, np.ones(400, np.float32), ReduceOp.SUM, ROOT)


def gather(m: Member) -> None:
    outputs = [np.zeros(40) for _ in range(m.size)] if m.rank == ROOT else None
    m.comm.gather(m.call(Kind.GATHER, np.float64, root=ROOT), outputs, np.zeros(40), ROOT)


def scatter(m: Member) -> None:
    inputs = [np.zeros(40) for _ in range(m.size)] if m.rank == ROOT else None
    m.comm.scatter(m.call(Kind.SCATTER, np.float64, root=ROOT), np.zeros(40), inputs, ROOT)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 12])
@pytest.mark.parametrize(
    ("algorithm", "table", "body"),
    [
        (Algorithm.PAIRWISE, LARGE, all_reduce),
        (Algorithm.PAIRWISE, LARGE, all_gather),
        (Algorithm.HALVING, RING, all_reduce),
        (Algorithm.RING, RING, all_gather),
        (Algorithm.BRUCK, SMALL, all_gather),
        (Algorithm.DISSEMINATION, SMALL, Member.barrier),
        (Algorithm.TREE, SMALL, broadcast),
        (Algorithm.TREE, SMALL, reduce),
        (Algorithm.CHAIN, CHAIN, broadcast),
        (Algorithm.DIRECT, SMALL, gather),
        (Algorithm.DIRECT, SMALL, scatter),
    ],
)
def test_links_that_are_needed_are_known_before(
    n: int, algorithm: Algorithm, table: Thresholds, body: Any
) -> None:
    def run(m: Member) -> None:
        body(m)
        body(m)
        comm = m.comm
        assert isinstance(comm, Recording)
        peers = peers_of(algorithm, m.rank, n, ROOT)
        assert len(peers) == len(set(peers))
        assert comm.used == set(peers)
        assert comm.reached == ([peers] if len(peers) > 1 else [])

    run_group(Transport("recording", Recording), n, run, table)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_group_that_doubles_knows_its_links_before(n: int) -> None:
    test_links_that_are_needed_are_known_before(n, Algorithm.DOUBLING, SMALL, all_reduce)


@pytest.mark.parametrize("n", [5, 6, 12])
def test_a_reduction_in_parts_needs_the_links_of_its_two_halves(n: int) -> None:
    def run(m: Member) -> None:
        reduce(m)
        comm = m.comm
        assert isinstance(comm, Recording)
        ways = Algorithm.PAIRWISE, Algorithm.DIRECT
        expected = [peers_of(way, m.rank, n, ROOT) for way in ways]
        assert comm.reached == [peers for peers in expected if len(peers) > 1]

    run_group(Transport("recording", Recording), n, run, CHAIN)
