"""The cost model: its counts are what ranks send, its seconds what one works out by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.transport.counting import Count, counting
from tests.support.transport.rank_threads import LONG, TINY, Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Algorithm, Thresholds
from transport._choosing.cost import CollectiveCost, Cost, work_of
from transport._operands.reduce_op import ReduceOp

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
SIZES = (0, 60, 240, 6000)
"""Elements that every group here divides, so that all parts are equal; some for each algorithm."""
TABLE = replace(TINY, segment=256, star=240)
KINDS = [Kind(number) for number in range(Kind.BARRIER, Kind.SEND)]
ROOTED = {Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER}


def perform(member: Member, kind: Kind, count: int, dtype: np.dtype[Any]) -> None:
    """Make the call with an input of ``count`` elements."""
    n, rank, comm = member.size, member.rank, member.comm
    whole, total = np.ones(count, dtype), ReduceOp.SUM
    parts = [np.ones(count // n, dtype) for _ in range(n)]
    wholes = [np.ones(count, dtype) for _ in range(n)]
    reduces = kind in {Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER}
    call = member.call(kind, dtype, op=total if reduces else None, root=0 if kind in ROOTED else -1)
    calls: dict[Kind, Callable[[], None]] = {
        Kind.BARRIER: lambda: comm.barrier(call),
        Kind.BROADCAST: lambda: comm.broadcast(call, whole, 0),
        Kind.ALL_REDUCE: lambda: comm.all_reduce(call, whole, total),
        Kind.REDUCE: lambda: comm.reduce(call, whole, total, 0),
        Kind.ALL_GATHER: lambda: comm.all_gather(call, wholes, whole),
        Kind.REDUCE_SCATTER: lambda: comm.reduce_scatter(call, parts[0].copy(), parts, total),
        Kind.GATHER: lambda: comm.gather(call, wholes if rank == 0 else None, whole, 0),
        Kind.SCATTER: lambda: (
            comm.scatter(call, whole[: count // n], parts, 0)
            if rank == 0
            else comm.scatter(call, whole[: count // n], None, 0)
        ),
        Kind.ALL_TO_ALL: lambda: comm.all_to_all(call, [part.copy() for part in parts], parts),
    }
    calls[kind]()


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("pairs", [3, 5])
def test_the_model_counts_what_ranks_send(n: int, dtype: np.dtype[Any], pairs: int) -> None:
    table = replace(TABLE, pairwise_ranks=pairs)
    counts = {(kind, size): Count() for kind in KINDS for size in SIZES}
    gate = threading.Barrier(n, timeout=LONG)
    now: list[Count] = [Count()]

    def body(member: Member) -> None:
        for (kind, size), count in counts.items():
            gate.wait()
            now[0] = count
            gate.wait()
            perform(member, kind, size, dtype)

    class Current(Count):
        def add(self, nbytes: int) -> None:
            now[0].add(nbytes)

    run_group(Transport("counting", counting(lambda rank, peer: Current())), n, body, table)
    used = set[tuple[Kind, Algorithm]]()
    for (kind, size), count in counts.items():
        work = work_of(kind, size * dtype.itemsize, n, table, 4 // dtype.itemsize)
        assert (work.frames, work.nbytes) == (count.frames, count.bytes), (kind, size, work)
        used.add((kind, work.algorithm))
    if n == pairs and dtype == F32 and n > 3:
        assert len(used) == 9 + 5  # both ways of each collective that has two


@given(
    st.sampled_from(KINDS),
    st.integers(0, 1 << 26),
    st.integers(2, 3000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([DEFAULT, TABLE]),
)
def test_a_path_is_part_of_the_whole(
    kind: Kind, nbytes: int, n: int, widening: int, table: Thresholds
) -> None:
    work = work_of(kind, nbytes, n, table, widening)
    assert 0 < work.steps <= work.frames
    # Up to rounding, a path holds no more than all, and no rank has more to do than the path.
    assert work.path_bytes <= work.nbytes * (1 + 1e-9)
    assert work.path_reduced <= work.reduced * (1 + 1e-9)
    assert work.path_bytes * n >= work.nbytes * (1 - 1e-9)


def test_seconds_are_the_path_or_the_work_over_the_lanes() -> None:
    work = CollectiveCost(Algorithm.RING, 6, 24, 1000, 4000, 500, 2000)
    alone = 6 * 1e-5 + 1000 * 1e-9 + 500 * 2e-9
    assert Cost(1e-5, 1e-9, 2e-9, 4).seconds(work) == pytest.approx(alone)
    assert Cost(1e-5, 1e-9, 2e-9, 8).seconds(work) == pytest.approx(alone)
    assert Cost(1e-5, 1e-9, 2e-9, 1).seconds(work) == pytest.approx(4 * alone)


def test_the_all_reduce_of_the_docs() -> None:
    """log2 n (alpha + beta N + gamma N) by doubling, (n-1) (2 alpha + 2 beta N + gamma N) by a
    star; 2 (n-1) L alpha + 2 N (n-1)/n beta + … .
    """
    cost, n = Cost(1e-5, 1e-9, 1e-10, 1e9), 8
    small, no_stars = 4096, replace(DEFAULT, star_ranks=0)
    expected = 3 * (cost.alpha + small * (cost.beta + cost.gamma))
    assert cost.seconds(work_of(Kind.ALL_REDUCE, small, n, no_stars)) == pytest.approx(expected)
    expected = 7 * (2 * cost.alpha + small * (2 * cost.beta + cost.gamma))
    stars = replace(DEFAULT, star_ranks=n, star=small)
    assert cost.seconds(work_of(Kind.ALL_REDUCE, small, n, stars)) == pytest.approx(expected)
    large = 64 << 20
    laps = ceil(large / (n * DEFAULT.segment))
    share = large * (n - 1) / n
    expected = 2 * (n - 1) * laps * cost.alpha + 2 * share * cost.beta + share * cost.gamma
    assert cost.seconds(work_of(Kind.ALL_REDUCE, large, n, DEFAULT)) == pytest.approx(expected)


def test_one_rank_does_nothing() -> None:
    assert Cost(1, 1, 1, 1).seconds(work_of(Kind.ALL_REDUCE, 1000, 1, DEFAULT)) == 0


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER], ids=str)
@pytest.mark.parametrize("n", [32, 256, 1024])
def test_large_groups_double_while_it_pays_in_the_model(kind: Kind, n: int) -> None:
    beta = 1e-9
    cost = Cost(DEFAULT.frame * beta, beta, 0.0, 1e9)
    never = replace(
        DEFAULT, frame=0, all_reduce_doubling=-1, all_gather_doubling=-1, reduce_scatter_doubling=-1
    )
    always = replace(never, pairwise_ranks=n, **{f"{kind.name.lower()}_doubling": 1 << 60})
    used = set[Algorithm]()
    for exponent in range(10, 26):
        nbytes = 1 << exponent
        found = work_of(kind, nbytes, n, DEFAULT)
        used.add(found.algorithm)
        ways = [cost.seconds(work_of(kind, nbytes, n, table)) for table in (never, always)]
        if kind is not Kind.ALL_GATHER:  # by Bruck's algorithm it sends as much
            assert cost.seconds(found) <= min(ways) * (1 + 1e-9), (nbytes, found)
    # To halve what is to be scattered takes as few steps, and fewer bytes.
    assert len(used) == (1 if kind is Kind.REDUCE_SCATTER else 2)
