"""Arrays in memory that the members of a group share, on groups and meshes."""

from __future__ import annotations

import re

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks

BACKENDS = ["shm", "auto", "inproc"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_array_has_the_shape_and_dtype_that_were_asked_for(backend: str) -> None:
    def program() -> None:
        group = dist.group.WORLD
        for shape in ((), 5, (3, 4), [2, 0], (300, 400)):
            for dtype in ("float32", np.int64, bool):
                array = group.empty(shape, dtype)
                like = np.empty(shape, dtype)
                assert type(array) is np.ndarray
                assert (array.shape, array.dtype) == (like.shape, like.dtype)
                assert array.flags.writeable
                array[...] = dist.get_rank()
                assert group.all_reduce(array, dist.ReduceOp.MAX) is array
                assert (array == np.asarray(2).astype(dtype)).all()

    run_ranks(program, 3, backend=backend)


def test_a_mesh_gives_each_slice_memory_of_its_own() -> None:
    def program() -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name in ("dp", "tp"):
            array = mesh[name].empty((200, 200))
            array[:] = dist.get_rank()
            mesh[name].all_reduce(array)
            members = dist.get_process_group_ranks(mesh.get_group(name))
            assert (array == sum(members)).all()

    run_ranks(program, 4, backend="shm")


def test_async_calls_and_views_work_in_place() -> None:
    def program() -> None:
        array = dist.group.WORLD.empty((4, 100_000))
        array[:] = np.arange(4)[:, None] + dist.get_rank()
        works = [dist.all_reduce(row, async_op=True) for row in array]
        for i, work in enumerate(works):
            work.wait()
            assert (array[i] == 2 * i + 1).all()

    run_ranks(program, 2, backend="shm")


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_that_ask_for_different_arrays_are_told_who_asks_for_what(backend: str) -> None:
    def program() -> None:
        group, rank = dist.group.WORLD, dist.get_rank()
        for shapes, dtypes in (
            (((2, 3), (3, 2)), ("float32", "float32")),
            ((4, 5), ("float32", "float32")),
            ((4, 4), ("float32", "int32")),
        ):
            with pytest.raises(ValueError, match="different symmetric arrays") as error:
                group.empty(shapes[rank], dtypes[rank])
            for other in range(2):
                dims = np.empty(shapes[other]).shape
                wanted = f"rank {other}: shape {dims}, dtype {dtypes[other]}"
                assert re.search(re.escape(wanted), str(error.value))
        assert group.empty(3).shape == (3,)

    run_ranks(program, 2, backend=backend)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "match"),
    [
        (-1, "float32", ValueError, "-1"),
        ((2, -3), "float32", ValueError, r"\(2, -3\)"),
        (2.5, "float32", TypeError, "2.5"),
        ((2, "x"), "float32", TypeError, "integer"),
        (2, "U3", TypeError, "U3"),
        (2, ">f4", TypeError, "native byte order"),
    ],
)
def test_bad_arguments_are_named(shape: object, dtype: str, error: type, match: str) -> None:
    def program() -> None:
        with pytest.raises(error, match=match):
            dist.group.WORLD.empty(shape, dtype)

    run_ranks(program, 1)


def test_a_rank_outside_gets_none() -> None:
    def program() -> None:
        group = dist.new_group([0, 1], backend="shm")
        array = group.empty(10)
        assert (array is None) == (dist.get_rank() == 2)

    run_ranks(program, 3, backend="shm")


def test_memory_comes_back_when_all_have_dropped_it() -> None:
    def program() -> None:
        group = dist.group.WORLD
        kept = group.empty(100_000)
        places = set()
        for _ in range(10):
            array = group.empty(100_000)
            places.add(array.ctypes.data)
            del array
        assert len(places) <= 2
        assert kept.ctypes.data not in places

    run_ranks(program, 2, backend="shm")


def test_a_rank_that_never_asks_is_reported() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.group.WORLD.empty(10)

    with pytest.raises(RankError, match="rank"):
        run_ranks(program, 2, backend="shm", call_timeout=1.0)
