"""Asynchronous collectives of which the next begins before the last frames of the one before.

Rank 0 has issued all of its calls before the others issue their first, so none has ended before the
next one waits in its stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib.testing import run_ranks
from transport._calls.call import CallTail

COUNT = 1_200_000
WAIT = 60.0
Array = npt.NDArray[np.float32]
Calls = list[Callable[..., Any]]


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a call has begun before another one's end."""
    seen, end_before = threading.Event(), CallTail.end_before

    def noted(rest: CallTail) -> None:
        if rest.overlaps:
            seen.set()
        end_before(rest)

    monkeypatch.setattr(CallTail, "end_before", noted)
    return seen


class Order:
    """Has rank 0 issue its calls first, and the others when it has."""

    def __init__(self) -> None:
        self._issued = threading.Event()

    def issue(self, calls: Calls) -> list[dist.Work[Any]]:
        if dist.get_rank() != 0:
            assert self._issued.wait(WAIT)
        works = [call(async_op=True) for call in calls]
        self._issued.set()
        return works


def numbers(call: int, count: int = COUNT) -> Array:
    return np.random.default_rng(100 * dist.get_rank() + call).random(count, np.float32)


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
    """Calls each of which works on what the one before it gives, also where that is copied back."""
    a, b, *_, f = arrays
    size = dist.get_world_size()
    part = COUNT // size
    return [
        lambda **how: dist.all_reduce(f, **how),
        lambda **how: dist.all_reduce(a[::2], **how),  # read when it is issued
        lambda **how: dist.all_reduce(a, **how),
        lambda **how: dist.all_reduce(a[1:], **how),
        lambda **how: dist.reduce_scatter_tensor(b[:part], a[: part * size], **how),
        lambda **how: dist.all_gather_into_tensor(a[: part * size], b[:part], **how),
        lambda **how: dist.all_reduce(a[:-1], dist.ReduceOp.AVG, **how),
    ]


@pytest.mark.parametrize("backend", ["tcp", "inproc"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("calls", [reductions, several_kinds, dependent])
def test_calls_that_overlap_give_what_they_give_one_after_the_other(
    overlapped: threading.Event, calls: Callable[[list[Array]], Calls], size: int, backend: str
) -> None:
    order = Order()

    def program() -> bool:
        arrays, alone = ([numbers(call) for call in range(6)] for _ in range(2))
        for work in order.issue(calls(arrays)):
            work.wait()
        for call in calls(alone):
            call()
        return all((one == other).all() for one, other in zip(arrays, alone, strict=True))

    assert all(run_ranks(program, size, backend=backend))
    assert overlapped.is_set() or calls is dependent


@pytest.mark.parametrize("backend", ["tcp", "inproc"])
def test_a_wrong_call_behind_another_raises_on_every_rank(
    overlapped: threading.Event, backend: str
) -> None:
    order = Order()

    def program() -> None:
        count = COUNT - dist.get_rank()
        works = order.issue(reductions([numbers(0), numbers(1, count)]))
        with pytest.raises(dist.CollectiveMismatchError, match=str(COUNT - 1)):
            works[1].wait()

    run_ranks(program, 2, backend=backend)
    assert overlapped.is_set()


def test_past_the_deadline_all_that_overlap_name_who_has_not_come() -> None:
    given_up = threading.Event()

    def program() -> None:
        if dist.get_rank() == 1:
            assert given_up.wait(WAIT)
            return
        works = [dist.all_reduce(numbers(i), async_op=True, timeout=0.5) for i in range(2)]
        for work in works:
            with pytest.raises(dist.CollectiveTimeoutError, match="rank 1"):
                work.wait()
        given_up.set()

    run_ranks(program, 2, backend="tcp")


def gathers() -> list[dist.Work[Any]]:
    """Two calls, of which the first has posted everything before it waits."""
    group = dist.group.WORLD
    assert group is not None
    stream = call_queue_of(group).streams.collectives
    assert stream.try_enter()
    works = [
        dist.all_gather_into_tensor(np.empty(2 * COUNT, np.float32), numbers(i), async_op=True)
        for i in range(2)
    ]
    stream.leave()
    return works


def abort(group: dist.ProcessGroup) -> None:
    group.abort("enough")


def lose_the_link(group: dist.ProcessGroup) -> None:
    communicator: Any = call_queue_of(group).state.communicator("cpu")
    for link in communicator._links.values():
        link.abort("cut")


@pytest.mark.parametrize("by", [0, 1])
@pytest.mark.parametrize("fault", [abort, lose_the_link])
def test_both_calls_raise_on_every_rank(
    overlapped: threading.Event, fault: Callable[[dist.ProcessGroup], None], by: int
) -> None:
    def program() -> None:
        group = dist.group.WORLD
        assert group is not None
        dist.all_reduce(numbers(0))
        works = gathers() if dist.get_rank() == 0 else []
        assert overlapped.wait(WAIT)
        if dist.get_rank() == by:
            fault(group)
        for work in works:
            with pytest.raises(dist.DistError):
                work.wait()
        with pytest.raises(dist.DistError):
            dist.all_reduce(numbers(0))

    run_ranks(program, 2, backend="tcp")
