"""How often a call's longest path crosses from one site to another, by a simulation.

A frame between sites takes one delay, one inside a site none.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.net.clocked_links import KINDS, Clocked, Clocks, delays_of
from tests.support.transport.pretended import pretended
from tests.support.transport.rank_threads import Member, run_group
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Thresholds
from transport._place import Place

LARGE = Thresholds(
    star=16, all_reduce_doubling=256, reduce_scatter_doubling=4, all_gather_doubling=16,
    broadcast_tree=128, reduce_tree=128, segment=512, frame=64, one_slice=64,
)  # fmt: skip


def crossings(kind: Kind, count: int, hosts: str, table: Thresholds, *, named: bool) -> int:
    """``hosts`` has the site of each host, with one rank each; which they have said or not."""

    def weigh(sender: int, receiver: int) -> int:
        return int(hosts[sender] != hosts[receiver])

    clocks = Clocks(weigh)

    def across(membership: Any, table: Any) -> Clocked:
        return Clocked(membership, table, clocks)

    places = [Place(f"host {rank}", site=site if named else "") for rank, site in enumerate(hosts)]

    def body(m: Member) -> int:
        return delays_of(m, kind, count, clocks)

    return max(run_group(pretended(places, across), len(hosts), body, table))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaaabbbb", "aaabb"])
def test_small_calls_wait_for_one_crossing(kind: Kind, hosts: str) -> None:
    size = len(hosts)
    found = crossings(kind, size, hosts, DEFAULT, named=True)
    flat = crossings(kind, size, hosts, DEFAULT, named=False)
    assert found == 1 <= flat


@pytest.mark.parametrize("kind", KINDS[1:])
def test_large_calls_wait_for_no_more_than_flat_ones(kind: Kind) -> None:
    """Up to 64 MiB; an all_reduce of any size crosses once to and once fro."""
    found = crossings(kind, 8 * 512, "aabb", LARGE, named=True)
    assert found == (2 if kind is Kind.ALL_REDUCE else 1)
    assert found <= crossings(kind, 8 * 512, "aabb", LARGE, named=False)
