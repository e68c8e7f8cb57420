"""One-sided windows: on groups that share memory, by messages, and on two hosts with both."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from meshlib.testing import RankError, run_ranks
from transport import _native
from transport._auto import choose
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._place import Place

DEADLINE = 100.0
SIZE = 4
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
UPDATED = (*INTEGERS, "float32", "float64")
OTHERS = ("bool", "float16", "complex64", "complex128", ml_dtypes.bfloat16)


def two_hosts(membership: Membership) -> Communicator:
    """Ranks 0 and 1 share a host, the others another one."""
    places = [Place("a" if rank < 2 else "b") for rank in membership.ranks]
    return choose(replace(membership, places=tuple(places)))


dist.Backend.register_backend("two_hosts", two_hosts)
BACKENDS = ["tcp", "inproc"]
if _native.core is not None:
    BACKENDS += ["shm", "two_hosts"]
everywhere = pytest.mark.parametrize("backend", BACKENDS)


def run(program: Callable[..., Any], backend: str, size: int = SIZE, *args: Any) -> list[Any]:
    return run_ranks(program, size, *args, backend=backend, timeout=DEADLINE)


def world() -> tuple[dist.ProcessGroup, int, int]:
    group = dist.group.WORLD
    return group, group.rank(), group.size()


@everywhere
@pytest.mark.parametrize("size", [1, 2, SIZE])
def test_put_and_get_reach_every_array(backend: str, size: int) -> None:
    def program() -> None:
        group, rank, size = world()
        for dtype in (*UPDATED, *OTHERS):
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


@everywhere
def test_a_signal_comes_after_what_was_put_before(backend: str) -> None:
    rounds, count = 40, 5000

    def program() -> None:
        group, rank, size = world()
        left, right = (rank - 1) % size, (rank + 1) % size
        with group.window(np.zeros((2, count), np.int32)) as window:
            for i in range(1, rounds + 1):
                window.put(np.full(count, i, np.int32), right, (i % 2) * count)
                window.signal(right)
                window.wait_signal(left)
                assert (window.array[i % 2] == i).all()
                # The left one may overwrite it two rounds later: after it got this rank's signal.
                window.signal(left)
                window.wait_signal(right)

    run(program, backend)


@everywhere
def test_signals_of_ranks_are_counted_apart(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with group.window(np.zeros(1)) as window:
            for _ in range(rank):
                window.signal(0)
            window.signal(rank)
            if rank == 0:
                for src in (2, 3, 1, 2, 3, 3):
                    window.wait_signal(src)
                with pytest.raises(dist.CollectiveTimeoutError, match="rank 3 has sent no signal"):
                    window.wait_signal(3, timeout=0.01)
            window.wait_signal(rank)

    run(program, backend)


@everywhere
def test_a_lock_keeps_the_others_off(backend: str) -> None:
    rounds = 15

    def program() -> None:
        group, _, size = world()
        with group.window(np.zeros(3, np.int64)) as window:
            for _ in range(rounds):
                with window.lock(1):
                    window.put(window.get(1, 2, 1) + 1, 1, 2)
            with window.lock(1, shared=True):
                window.get(1)
            window.fence()
            assert window.get(1)[2] == rounds * size

    run(program, backend)


@everywhere
def test_many_share_a_lock_and_one_has_it_alone(backend: str) -> None:
    def program() -> None:
        group, rank, size = world()
        with group.window(np.zeros(1)) as window:
            with window.lock(0, shared=True):
                group.barrier()  # all have it
                late = pytest.raises(dist.CollectiveTimeoutError, match=f"held by {size} ranks")
                with late, window.lock(0, timeout=1.0):
                    pass
                group.barrier()
            group.barrier()
            if rank == 1:
                with window.lock(0):
                    group.barrier()
                    group.barrier()
            else:
                group.barrier()
                late = pytest.raises(
                    dist.CollectiveTimeoutError, match="rank 1 has kept the lock of rank 0"
                )
                with late, window.lock(0, shared=True, timeout=1.0):
                    pass
                group.barrier()
            with window.lock(0):
                pass

    run(program, backend)


@everywhere
def test_a_block_that_raises_gives_its_lock_back(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with group.window(np.zeros(1)) as window:
            if rank == 1:
                with pytest.raises(KeyError), window.lock(0):
                    raise KeyError
                window.signal(0)
            if rank == 0:
                window.wait_signal(1)
                with window.lock(0, timeout=DEADLINE):
                    pass

    run(program, backend, 2)


@everywhere
def test_windows_of_subgroups_and_meshes(backend: str) -> None:
    def program() -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank = dist.get_rank()
        for name in ("dp", "tp"):
            dim = mesh[name]
            with dim.window(np.full(1, rank)) as window:
                members = dist.get_process_group_ranks(dim.get_group())
                assert [int(window.get(member)[0]) for member in members] == members
                assert int(window.get(group_dst=1)[0]) == members[1]
                stranger = next(r for r in range(4) if r not in members)
                with pytest.raises(ValueError, match=f"dst: .*{stranger}"):
                    window.get(stranger)
        odd = dist.new_group([1, 3])
        if rank % 2:
            with odd.window(np.array([rank])) as window:
                assert window.get(3)[0] == 3
        else:
            assert odd.window(np.array([rank])) is None

    run(program, backend)


@everywhere
def test_several_windows_and_what_their_ends_leave(backend: str) -> None:
    def program() -> None:
        group, rank, size = world()
        first, second = group.window(np.zeros(1)), group.window(np.zeros(2))
        second.put([1.0, 2.0], (rank + 1) % size)
        second.fence()
        assert first.array.tolist() == [0.0]
        second.close()
        second.close()
        assert second.array.tolist() == [1.0, 2.0]
        for use in (
            lambda: second.put([1.0], 0),
            lambda: second.get(0),
            lambda: second.wait_signal(0),
            second.flush,
        ):
            with pytest.raises(ValueError, match=r"<Window of 2 .* closed> was closed"):
                use()
        first.put([3.0], (rank + 1) % size)
        first.close()
        assert first.array.tolist() == [3.0]

    run(program, backend)


@everywhere
def test_members_that_give_different_dtypes_are_told_so(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with pytest.raises(ValueError, match="different dtypes") as error:
            group.window(np.zeros(1, "float32" if rank else "int64"))
        assert re.search("rank 0: int64\n  rank 1: float32", str(error.value))
        group.window(np.zeros(1)).close()

    run(program, backend, 2)


BAD: dict[str, tuple[Callable[[dist.Window], Any], type[Exception], str]] = {
    "stranger": (lambda w: w.put([1], 7), ValueError, "dst: .*7"),
    "no rank": (lambda w: w.put([1]), ValueError, "exactly one of dst and group_dst"),
    "two ranks": (lambda w: w.get(0, group_dst=0), ValueError, "exactly one of dst and group_dst"),
    "no rank to wait for": (lambda w: w.wait_signal(), ValueError, "exactly one of src"),
    "group rank": (lambda w: w.signal(group_dst=2), ValueError, "group_dst is 2; expected 0 to 1"),
    "rank of a wrong type": (lambda w: w.get("0"), TypeError, "dst must be a whole number"),
    "too far": (
        lambda w: w.put([1, 2], 1, 3),
        ValueError,
        r"offset is 3 for 2 elements; expected both within the 4 elements of rank 1's array",
    ),
    "negative": (lambda w: w.get(0, -1), ValueError, "offset is -1 for 5 elements"),
    "negative count": (lambda w: w.get(0, 2, -1), ValueError, "offset is 2 for -1 elements"),
    "half an offset": (lambda w: w.get(0, 1.5), TypeError, "offset must be a whole number"),
    "other dtype": (
        lambda w: w.put(np.ones(1), 0),
        TypeError,
        "values has dtype float64; expected int64, the window's",
    ),
    "floats": (lambda w: w.put([1.5], 0), TypeError, r"values is \[1.5\]; expected int64"),
    "too large": (lambda w: w.put([2**70], 0), (TypeError, ValueError), "values is"),
    "several": (lambda w: w.fetch_and_op([1, 2], 0), ValueError, "value has 2 elements"),
    "mean": (
        lambda w: w.accumulate([1], 0, op=dist.ReduceOp.AVG),
        TypeError,
        "op is ReduceOp.AVG; expected one of ReduceOp.SUM",
    ),
    "no op": (lambda w: w.accumulate([1], 0, op="SUM"), TypeError, "op is 'SUM'; expected one"),
    "timeout": (lambda w: w.wait_signal(0, timeout=-1), ValueError, "timeout must be"),
}


@pytest.mark.parametrize("backend", ["tcp", "shm"] if _native.core is not None else ["tcp"])
def test_wrong_arguments_are_named_and_leave_the_window_usable(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with group.window(np.zeros(4, np.int64)) as window:
            for use, error, text in BAD.values():
                with pytest.raises(error, match=text):
                    use(window)
            window.accumulate([1], 0)
            window.fence()
            assert window.get(0).tolist() == [2, 0, 0, 0]
        for dtype in OTHERS:
            only = pytest.raises(TypeError, match="takes put and get only; expected one of int8")
            with group.window(np.zeros(1, dtype)) as window, only:
                window.accumulate(np.zeros(1, dtype), 0)
        refused = pytest.raises(TypeError, match=r"BAND.*float64")
        with group.window(np.zeros(1)) as window, refused:
            window.fetch_and_op(1.0, 0, op=dist.ReduceOp.BAND)
        with pytest.raises(TypeError, match="array must be a NumPy"):
            group.window("text" if rank else 5)

    run(program, backend, 2)


@everywhere
def test_a_destroyed_group_ends_its_windows(backend: str) -> None:
    def program() -> None:
        group = dist.new_group([0, 1])
        window = group.window(np.zeros(1))
        window.put([1.0], 1 - dist.get_rank())
        window.fence()
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="was destroyed"):
            window.get(0)
        dist.barrier()  # the other has destroyed its group, too
        assert not [t for t in threading.enumerate() if t.name.startswith("meshlib-windows")]

    run(program, backend, 2)


@everywhere
def test_a_rank_that_raises_is_named_where_others_wait(backend: str) -> None:
    def program() -> None:
        group, rank, _ = world()
        with group.window(np.zeros(1)) as window:
            if rank == 2:
                raise KeyError("rank 2 ends")
            with pytest.raises(dist.RankFailedError, match="rank 2 ") as error:
                window.wait_signal(2)
            raise error.value

    with pytest.raises(RankError, match="rank 2 of 3 raised KeyError"):
        run(program, backend, 3)
