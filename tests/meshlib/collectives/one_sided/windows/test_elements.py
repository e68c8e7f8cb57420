"""Elements of a window are read, written and updated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from tests.support.meshlib.windows import DEADLINE, NOT_UPDATED, SIZE, everywhere, run, world

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
UPDATED = (*INTEGERS, "float32", "float64")


@everywhere
@pytest.mark.parametrize("size", [1, 2, SIZE])
def test_put_and_get_reach_every_array(backend: str, size: int) -> None:
    def program() -> None:
        group, rank, size = world()
        for dtype in (*UPDATED, *NOT_UPDATED):
            mine = np.arange(2 + rank).astype(dtype).reshape(1, -1)
            with group.window(mine) as window:
                assert window.array.shape == mine.shape
                assert window.array.dtype == mine.dtype
                assert (window.array == mine).all()
                for dst in range(size):
                    assert window.get(dst).tolist() == np.arange(2 + dst).astype(dtype).tolist()
                    assert window.get(dst, 1, 0).shape == (0,)
                window.fence()
                right = (rank + 1) % size
                window.put(np.ones(1, dtype), right, 1)
                window.put(np.ones(0, dtype), right, 2)
                window.flush(right)
                assert window.get(right, 1, 1)[0] == np.ones(1, dtype)[0]
                window.fence()
                expected = mine.copy()
                expected[0, 1] = 1
                assert (window.array == expected).all()
            assert (mine == np.arange(2 + rank).astype(dtype)).all()

    run(program, backend, size)


@everywhere
def test_large_arrays_travel_whole(backend: str) -> None:
    def program() -> None:
        group, rank, size = world()
        count = 300_000
        right = (rank + 1) % size
        with group.window(np.zeros(count)) as window:
            values = np.full(count, float(rank))
            window.put(values, right)
            values[:] = -1  # it was copied
            window.accumulate(np.ones(count), right)
            window.fence()
            assert (window.array == (rank - 1) % size + 1).all()
            assert (window.get(right) == rank + 1).all()

    run(program, backend)


@everywhere
def test_updates_of_one_element_are_all_seen(backend: str) -> None:
    ops: dict[str, Callable[[Any, Any], Any]] = {
        "SUM": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }

    def program() -> None:
        group, rank, size = world()
        for dtype in UPDATED:
            for name, ufunc in ops.items():
                if name.startswith("B") and dtype not in INTEGERS:
                    continue
                start = np.array([3, 100, 7, 1], dtype)
                given = [np.array([r + 1, 2, 90 + r, r], dtype) for r in range(size)]
                with group.window(start) as window:
                    window.fence()
                    window.accumulate(given[rank], 0, op=getattr(dist.ReduceOp, name))
                    window.fence()
                    expected = start
                    with np.errstate(over="ignore"):
                        for one in given:
                            expected = ufunc(expected, one)
                    assert (window.get(0) == expected).all(), (dtype, name)

    run(program, backend, 3)


@everywhere
def test_a_minimum_of_floats_keeps_nan(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with group.window(np.array([1.0, np.nan])) as window:
            if rank == 1:
                window.accumulate([np.nan, 0.0], 0, op=dist.ReduceOp.MIN)
            window.fence()
            assert np.isnan(window.get(0)).all()

    run(program, backend, 2)


@everywhere
def test_threads_and_ranks_count_every_step_once(backend: str) -> None:
    """The counter of work stealing: each number is handed out once, whoever asks."""
    each, threads = 60, 3

    def program() -> list[int]:
        group, _, size = world()
        mine = current_world()
        with group.window(np.zeros(2, np.int64)) as window:
            found: list[int] = []

            def take() -> None:
                mine.adopt_thread()
                for _ in range(each):
                    found.append(int(window.fetch_and_op(1, dst=size - 1, offset=1)))

            others = [threading.Thread(target=take, daemon=True) for _ in range(threads - 1)]
            for thread in others:
                thread.start()
            take()
            for thread in others:
                thread.join(DEADLINE)
            return found

    found = [*chain(*run(program, backend))]
    assert sorted(found) == list(range(SIZE * threads * each))


@everywhere
def test_work_is_stolen_from_a_rank_that_is_slow(backend: str) -> None:
    """Each rank has tasks of its own, and takes those of others when it has none left."""
    tasks = 24

    def program() -> list[tuple[int, int]]:
        group, rank, size = world()
        done: list[tuple[int, int]] = []
        with group.window(np.zeros(1, np.int32)) as window:
            if rank == 0:  # takes none of its tasks until the others have done them
                for other in range(1, size):
                    window.wait_signal(other)
            for turn in range(size):
                victim = (rank + turn) % size
                while (task := window.fetch_and_op(1, victim)) < tasks:
                    done.append((victim, int(task)))
            if rank:
                window.signal(0)
        return done

    found = run(program, backend)
    assert found[0] == []
    assert sorted(chain(*found)) == [(r, t) for r in range(SIZE) for t in range(tasks)]


@everywhere
def test_a_distributed_hash_table(backend: str) -> None:
    """Keys are claimed by compare_and_swap in open addressing, over the slots of all ranks."""
    slots, keys_each = 64, 25

    def program() -> dict[int, int]:
        group, rank, size = world()
        keys, values = group.window(np.zeros(slots, np.int64)), group.window(np.zeros(slots))

        def locate(key: int) -> tuple[int, int]:
            hashed = key * 2654435761 % (slots * size)
            for probe in range(slots * size):
                dst, offset = divmod((hashed + probe) % (slots * size), slots)
                if keys.compare_and_swap(0, key, dst, offset) in (0, key):
                    return dst, offset
            raise AssertionError("the table is full")

        mine = [1 + (rank * 17 + i) % (size * keys_each) for i in range(2 * keys_each)]
        for key in mine:  # two ranks or more insert some keys
            values.accumulate([key / 2], *locate(key))
        values.fence()
        found = {key: float(values.get(*locate(key), 1)[0]) for key in mine}
        values.close()
        keys.close()
        return {key: round(value * 2 / key) for key, value in found.items()}

    found = run(program, backend)
    inserted = [
        key
        for rank in range(SIZE)
        for key in (1 + (rank * 17 + i) % (SIZE * keys_each) for i in range(2 * keys_each))
    ]
    for counts in found:
        assert counts == {key: inserted.count(key) for key in counts}


@everywhere
def test_compare_and_swap_replaces_what_is_expected_only(backend: str) -> None:
    def program() -> None:
        group, rank, size = world()
        for dtype in UPDATED:
            with group.window(np.full(2, 5, dtype)) as window:
                if rank == 0:
                    for dst in range(size):
                        assert window.compare_and_swap(4, 9, dst, 1) == 5
                        assert window.compare_and_swap(5, 9, dst, 1) == 5
                        assert window.compare_and_swap(5, 7, dst, 1) == 9
                        assert window.fetch_and_op(3, dst, 1, op=None) == 9
                        before = window.fetch_and_op(3, dst, 1)
                        assert before == 3
                        assert before.dtype == dtype
                window.fence()
                assert window.array.tolist() == [5, 6]

    run(program, backend, 3)
