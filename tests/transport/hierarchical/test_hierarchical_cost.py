"""The cost of collectives over many hosts: what one works out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.net.clocked_links import KINDS
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Algorithm
from transport._choosing.cost import Cost, work_of
from transport._hierarchical.cost import HostsCost, Shape, inside_bytes, phases

INSIDE = Cost(alpha=1e-6, beta=1e-10, gamma=1e-11, parallelism=8)
ACROSS = Cost(alpha=2e-5, beta=1e-9, gamma=1e-11, parallelism=1000)
COST = HostsCost(INSIDE, ACROSS)


def test_a_large_all_reduce_is_three_phases() -> None:
    nbytes, hosts, ranks = 64 << 20, 16, 8
    shape = Shape(hosts, ranks)
    between = work_of(Kind.ALL_REDUCE, nbytes, hosts, DEFAULT)
    across = between.steps * 2e-5 + 2 * nbytes * 15 / 16 * 1e-9 + nbytes * 15 / 16 * 1e-11
    # Reduce-scatter: stage all, take 7 parts; all-gather: stage one part, take 7.
    moved = nbytes + 7 / 8 * nbytes + nbytes / 8 + 7 / 8 * nbytes
    expected = across + 4 * 1e-6 + moved * 1e-10
    assert COST.on_two_levels(Kind.ALL_REDUCE, nbytes, shape, DEFAULT) == pytest.approx(expected)


def test_a_barrier_costs_latency_alone() -> None:
    seconds = COST.on_two_levels(Kind.BARRIER, 0, Shape(1000, 8), DEFAULT)
    assert seconds == pytest.approx(10 * 2e-5 + 2 * 1e-6)


def test_more_ranks_than_processors_take_turns() -> None:
    few = COST.on_two_levels(Kind.BARRIER, 0, Shape(2, 8), DEFAULT)
    many = COST.on_two_levels(Kind.BARRIER, 0, Shape(2, 32), DEFAULT)
    assert many - few == pytest.approx(3 * 2 * 1e-6)


def test_an_all_to_all_sends_a_frame_to_every_rank_elsewhere() -> None:
    nbytes, shape = 8 << 20, Shape(4, 2)
    seconds = COST.on_two_levels(Kind.ALL_TO_ALL, nbytes, shape, DEFAULT)
    here = nbytes // 4
    inside = 2 * 1e-6 + 1.5 * here * 1e-10
    assert seconds == pytest.approx(inside + 6 * 2e-5 + 2 * nbytes * 3 / 4 * 1e-9)


@given(st.sampled_from(KINDS), st.integers(0, 1 << 28), st.integers(1, 2000))
def test_one_rank_a_host_has_one_level(kind: Kind, nbytes: int, hosts: int) -> None:
    shape = Shape(hosts, 1)
    flat = COST.on_one_level(kind, nbytes, shape, DEFAULT)
    assert COST.on_two_levels(kind, nbytes, shape, DEFAULT) == pytest.approx(flat)


@given(st.integers(2, 300), st.integers(2, 16))
def test_large_data_crosses_less_often_on_two_levels(hosts: int, ranks: int) -> None:
    """However ranks exchange it pairwise, or double it: in a ring alone, hosts send as little."""
    nbytes, shape = 256 << 20, Shape(hosts, ranks)
    work = work_of(Kind.ALL_REDUCE, nbytes, shape.ranks, DEFAULT)
    one, two = (
        f(Kind.ALL_REDUCE, nbytes, shape, DEFAULT) for f in (COST.on_one_level, COST.on_two_levels)
    )
    if work.algorithm is Algorithm.PAIRWISE:
        assert two < one
    assert two < 2 * one


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.BROADCAST, 100),
        (Kind.REDUCE_SCATTER, 175),
        (Kind.ALL_GATHER, 400),
        (Kind.ALL_REDUCE, 100 + 75 + 25 + 75),
        (Kind.BARRIER, 0),
    ],
)
def test_bytes_that_a_member_reads_inside(kind: Kind, expected: float) -> None:
    assert inside_bytes(kind, 100, 4) == expected


def test_what_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="SCATTER is not a step"):
        inside_bytes(Kind.SCATTER, 100, 4)
    with pytest.raises(ValueError, match="SCATTER has no phases"):
        phases(Kind.SCATTER, 100, Shape(2, 2))
