"""Asynchronous collectives of which two are under way at a time, over links that claim delay.

Rank 0 has issued all of its calls before the others issue their first, so none has ended before the
next one waits in its lane.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from transport.algorithms.exchanges.overlap import Overlap
from transport.link import Outbox, Pace
from transport.tcp.link import TcpLink

COUNT = 700_000  # two laps of a reduction between two ranks
Array = npt.NDArray[np.float32]
Calls = list[Callable[..., Any]]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make links of TCP far; return a list of what ``Overlap.let_next`` says on all ranks."""
    said: list[bool] = []
    let_next = Overlap.let_next

    def noted(self: Overlap, outbox: Outbox) -> bool:
        said.append(let_next(self, outbox))
        return said[-1]

    def far(_: TcpLink) -> Pace:
        return Pace(2e-3, 1e9)

    monkeypatch.setattr(Overlap, "let_next", noted)
    monkeypatch.setattr(TcpLink, "pace", far)
    return said


class Order:
    """Has rank 0 issue its calls first, and the others when it has."""

    def __init__(self) -> None:
        self._issued = threading.Event()

    def issue(self, calls: Calls) -> list[dist.Work[Any]]:
        if dist.get_rank() != 0:
            assert self._issued.wait(60)
        works = [call(async_op=True) for call in calls]
        self._issued.set()
        return works


def numbers(call: int, count: int = COUNT) -> Array:
    return np.random.default_rng(100 * dist.get_rank() + call).random(count, np.float32)


def settle() -> None:
    """Make the calls in which members agree that their links are far."""
    for _ in range(4):
        dist.all_reduce(np.ones(3 * COUNT, np.float32))


def reductions(arrays: list[Array]) -> Calls:
    return [lambda x=x, **how: dist.all_reduce(x, dist.ReduceOp.AVG, **how) for x in arrays]


def several_kinds(arrays: list[Array]) -> Calls:
    """Calls that overlap, and others between them."""
    a, b, c, d, e, f = arrays
    size = dist.get_world_size()
    part = COUNT // size
    return [
        lambda **how: dist.reduce_scatter_tensor(a[:part], b[: part * size], **how),
        lambda **how: dist.all_reduce(c, **how),
        lambda **how: dist.all_gather_into_tensor(d[: part * size], e[:part], **how),
        lambda **how: dist.all_gather_into_tensor(b[: part * size], f[:part], **how),
        lambda **how: dist.broadcast(e, 1, **how),
        lambda **how: dist.all_reduce(f, **how),
        lambda **how: dist.all_reduce(a[:2], **how),
        lambda **how: dist.all_reduce(c, **how),
        dist.barrier,
        lambda **how: dist.all_reduce(d, **how),
        lambda **how: dist.all_reduce(e, **how),
    ]


def dependent(arrays: list[Array]) -> Calls:
    """Calls each of which works on what the one before it gives."""
    a, b, *_ = arrays
    size = dist.get_world_size()
    part = COUNT // size
    return [
        lambda **how: dist.all_reduce(a, **how),
        lambda **how: dist.all_reduce(a[1:], **how),
        lambda **how: dist.reduce_scatter_tensor(b[:part], a[: part * size], **how),
        lambda **how: dist.all_gather_into_tensor(a[: part * size], b[:part], **how),
        lambda **how: dist.all_reduce(a[:-1], **how),
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("calls", [reductions, several_kinds, dependent])
def test_calls_that_overlap_give_what_they_give_one_after_the_other(
    begun: list[bool], calls: Callable[[list[Array]], Calls], size: int
) -> None:
    order = Order()

    def program() -> bool:
        settle()
        arrays, alone = ([numbers(call) for call in range(6)] for _ in range(2))
        for work in order.issue(calls(arrays)):
            work.wait()
        for call in calls(alone):
            call()
        return all((one == other).all() for one, other in zip(arrays, alone, strict=True))

    assert all(run_ranks(program, size, backend="tcp"))
    assert any(begun)


def test_a_wrong_call_behind_another_raises_on_every_rank(begun: list[bool]) -> None:
    order = Order()

    def program() -> None:
        settle()
        count = COUNT - dist.get_rank()
        arrays = [numbers(0), numbers(1, count)]
        works = order.issue(reductions(arrays))
        with pytest.raises(dist.CollectiveMismatchError, match=str(COUNT - 1)):
            works[1].wait()

    run_ranks(program, 2, backend="tcp")
    assert any(begun)


def test_past_the_deadline_all_that_overlap_name_who_has_not_come(begun: list[bool]) -> None:
    given_up = threading.Event()

    def program() -> None:
        settle()
        if dist.get_rank() == 1:
            assert given_up.wait(60)
            return
        first = dist.all_reduce(numbers(0), async_op=True, timeout=0.5)
        second = dist.all_reduce(numbers(1), async_op=True, timeout=0.5)
        for work in (first, second):
            with pytest.raises(dist.CollectiveTimeoutError, match="rank 1"):
                work.wait()
        given_up.set()

    run_ranks(program, 2, backend="tcp")
