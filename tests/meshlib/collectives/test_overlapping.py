"""Asynchronous collectives of which two are under way at a time, over links that claim delay.

Rank 0 has issued all of its calls before the others issue their first, so none has ended before the
next one waits in its stream.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from far_ranks import COUNT, Begun, Calls, Order, settle

import meshlib as dist
from meshlib.calls import overlap_queue
from meshlib.calls.call_stream import StreamThread
from meshlib.testing import run_ranks

Array = npt.NDArray[np.float32]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(monkeypatch)


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
    begun: Begun, calls: Callable[[list[Array]], Calls], size: int
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
    assert begun.once.is_set()


def test_a_wrong_call_behind_another_raises_on_every_rank(begun: Begun) -> None:
    order = Order()

    def program() -> None:
        settle()
        count = COUNT - dist.get_rank()
        arrays = [numbers(0), numbers(1, count)]
        works = order.issue(reductions(arrays))
        with pytest.raises(dist.CollectiveMismatchError, match=str(COUNT - 1)):
            works[1].wait()

    run_ranks(program, 2, backend="tcp")
    assert begun.once.is_set()


def test_past_the_deadline_all_that_overlap_name_who_has_not_come(begun: Begun) -> None:
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


def test_what_a_call_brings_back_at_its_end_is_there_for_the_next(begun: Begun) -> None:
    order = Order()

    def calls(x: Array) -> Calls:
        part = x[1::4].copy()
        return [
            lambda **how: dist.all_reduce(x[::2], **how),
            lambda **how: dist.all_reduce(x, dist.ReduceOp.AVG, **how),
            lambda **how: dist.all_gather([x[1::4], x[3::4]], part, **how),
            lambda **how: dist.all_reduce(x, dist.ReduceOp.AVG, **how),
            lambda **how: dist.all_reduce(numbers(7), **how),
        ]

    def program() -> bool:
        settle()
        together, alone = numbers(0), numbers(0)
        for work in order.issue(calls(together)):
            work.wait()
        for call in calls(alone):
            call()
        return bool((together == alone).all())

    assert all(run_ranks(program, 2, backend="tcp"))
    assert begun.once.is_set()


def test_the_time_of_a_call_begins_when_the_one_before_it_is_over(begun: Begun) -> None:
    order = Order()

    def program() -> bool:
        settle()
        arrays = [numbers(call) for call in range(4)]
        for work in order.issue(reductions(arrays)):
            work.wait()
        group = dist.group.WORLD
        assert group is not None
        records = group.context.recorder.records(group.id)[-4:]
        return all(one.ended <= next_.started for one, next_ in pairwise(records))

    assert all(run_ranks(program, 2, backend="tcp"))
    assert begun.once.is_set()


def test_arrays_are_let_go_of_when_their_calls_are_over(begun: Begun) -> None:
    order = Order()

    def issue() -> list[weakref.ref[Array]]:
        arrays = [numbers(call) for call in range(3)]
        for work in order.issue(reductions(arrays)):
            work.wait()
        return [weakref.ref(array) for array in arrays]

    def program() -> bool:
        settle()
        left = issue()
        dist.barrier()  # behind what is left to be done at the end of a call
        return not any(array() is not None for array in left)

    gc.disable()
    try:
        assert all(run_ranks(program, 2, backend="tcp"))
    finally:
        gc.enable()
    assert begun.once.is_set()


@pytest.mark.parametrize("seed", range(3))
def test_ranks_of_which_each_waits_elsewhere(begun: Begun, seed: int) -> None:
    """Which calls overlap differs by rank; results do not."""
    size = 4
    draw = np.random.default_rng(seed)
    chosen = [
        (int(draw.integers(5)), *(int(n) for n in draw.integers(6, size=2))) for _ in range(16)
    ]
    counts = [0, 1, size * 5_000, size * 30_000, size * 60_000, size * 100_000]

    def calls(arrays: list[Array]) -> Calls:
        found: Calls = []
        for kind, one, other in chosen:
            x, y = arrays[one], arrays[other]
            part = min(x.size, y.size) // size
            if kind == 3 and one != other:
                found.append(
                    lambda x=x, y=y, part=part, **how: dist.all_gather_into_tensor(
                        x[: part * size], y[:part], **how
                    )
                )
            elif kind == 4 and one != other:
                found.append(
                    lambda x=x, y=y, part=part, **how: dist.reduce_scatter_tensor(
                        x[:part], y[: part * size], dist.ReduceOp.MAX, **how
                    )
                )
            else:
                op = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.premul_sum(0.25))[kind % 3]
                found.append(lambda x=x, op=op, **how: dist.all_reduce(x, op, **how))
        return found

    def program() -> bool:
        settle()
        mine = np.random.default_rng((seed, dist.get_rank()))
        arrays, alone = (
            [numbers(call, count) for call, count in enumerate(counts)] for _ in range(2)
        )
        works: list[dist.Work[Any]] = []
        for call in calls(arrays):
            works.append(call(async_op=True))
            if mine.random() < 0.2:
                works[int(mine.integers(len(works)))].wait()
        for work in works:
            work.wait()
        for call in calls(alone):
            call()
        return all((one == other).all() for one, other in zip(arrays, alone, strict=True))

    assert all(run_ranks(program, size, backend="tcp"))


def test_copies_overlap_where_nothing_is_ever_reduced(begun: Begun) -> None:
    order = Order()

    def program() -> bool:
        found = np.empty((4, 2, 50_000), np.float32)

        own = [numbers(call, 50_000) for call in range(4)]

        def calls() -> Calls:
            return [
                lambda x=x, out=out, **how: dist.all_gather_into_tensor(out, x, **how)
                for x, out in zip(own, found, strict=True)
            ]

        calls()[0]()
        for work in order.issue(calls()):
            work.wait()
        together = found.copy()
        for call in calls():
            call()
        return bool((together == found).all())

    assert all(run_ranks(program, 2, backend="tcp"))
    assert begun.once.is_set()


def test_an_interpreter_without_room_for_threads_makes_one_call_after_the_other(
    begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order()

    class NoRoom(StreamThread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    def program() -> bool:
        settle()
        arrays, alone = ([numbers(call) for call in range(3)] for _ in range(2))
        for work in order.issue(reductions(arrays)):
            work.wait()
        for call in reductions(alone):
            call()
        return all((one == other).all() for one, other in zip(arrays, alone, strict=True))

    monkeypatch.setattr(overlap_queue, "StreamThread", NoRoom)
    assert all(run_ranks(program, 2, backend="tcp"))
    assert not begun.once.is_set()
