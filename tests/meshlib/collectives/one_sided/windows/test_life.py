"""Windows are made, refused and ended."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError
from tests.support.meshlib.windows import NOT_UPDATED, everywhere, run, world
from transport import _native


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
def test_different_dtypes_are_refused_on_all_members(backend: str) -> None:
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
        r"offset is 3 for 2 elements; expected elements within the 4 of rank 1's array",
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
        for dtype in NOT_UPDATED:
            only = pytest.raises(TypeError, match="supports only put and get; expected one of int8")
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
