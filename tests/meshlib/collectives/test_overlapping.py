"""Asynchronous collectives of which two are under way at a time, over links that claim delay."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from transport.algorithms.exchanges.overlap import Overlap
from transport.link import Pace
from transport.tcp.link import TcpLink

COUNT = 700_001


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make links of TCP far; return a list of what ``Overlap.let_next`` has returned."""
    begun: list[bool] = []
    let_next = Overlap.let_next

    def noted(self: Overlap, outbox: Any) -> bool:
        begun.append(let_next(self, outbox))
        return begun[-1]

    monkeypatch.setattr(TcpLink, "pace", lambda self: Pace(2e-3, 1e9))
    monkeypatch.setattr(Overlap, "let_next", noted)
    return begun


def numbers(rank: int, call: int, count: int = COUNT) -> npt.NDArray[np.float32]:
    return np.random.default_rng(100 * rank + call).random(count, np.float32)


def reduced(call: int, size: int) -> npt.NDArray[np.float32]:
    return sum((numbers(rank, call) for rank in range(size)), np.zeros(COUNT, np.float32))


@pytest.mark.parametrize("size", [2, 3])
def test_reductions_overlap_and_give_what_they_give_alone(far: list[bool], size: int) -> None:
    def program() -> None:
        rank = dist.get_rank()
        dist.barrier()
        arrays = [numbers(rank, call) for call in range(5)]
        works = [dist.all_reduce(array, async_op=True) for array in arrays]
        for work in works:
            work.wait()
        alone = [numbers(rank, call) for call in range(5)]
        for array in alone:
            dist.all_reduce(array)
        for array, other in zip(arrays, alone, strict=True):
            assert (array == other).all()

    run_ranks(program, size, backend="tcp")
    assert any(far)
