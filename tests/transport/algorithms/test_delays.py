"""How often a collective's longest path crosses the wire: the cost model against a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.net.clocked_links import KINDS, Clocked, Clocks, delays_of
from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Thresholds
from transport._choosing.cost import work_of


def delays(kind: Kind, nbytes: int, size: int, table: Thresholds) -> int:
    clocks = Clocks()

    def make(membership: Any, table: Thresholds) -> Clocked:
        return Clocked(membership, table, clocks)

    def body(m: Member) -> int:
        return delays_of(m, kind, nbytes // 4, clocks)

    return max(run_group(Transport("clocked", make), size, body, table))


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
    page = Path(__file__).parents[3] / "docs/inside/algorithms.md"
    assert "\n".join(rows) in page.read_text()
