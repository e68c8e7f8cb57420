"""Symmetric memory: in place, without a staged byte, given back, and never with wrong values."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.transport.collective_oracle import reduced
from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.header import Kind
from transport._communicators.runtime import Membership
from transport._errors import HeaderMismatchError
from transport._operands.reduce_op import Flat, ReduceOp, premul_sum
from transport._shm import ShmCommunicator
from transport._shm.sizes import Sizes

SIZES = Sizes(block=1 << 12, direct=64, ring=1 << 12)


def _make(membership: Membership, _table: object) -> ShmCommunicator:
    return ShmCommunicator(membership, SIZES)


SHM = Transport("shm", _make, has_links=False)


def allocate(member: Member, count: int, dtype: Any = np.float32, fill: float = 0) -> Flat:
    dtype = np.dtype(dtype)
    array = member.comm.allocate(member.call(Kind.ALLOCATE, dtype, count), count, dtype)
    array[:] = np.full(count, fill).astype(dtype)
    return array


def untouched(member: Member) -> list[bytes]:
    """The contents of this member's blocks, which stay the same if nothing was staged."""
    native: Any = member.comm.native_handle()
    return [native.block(member.rank, slot) for slot in range(4)]


def values(rank: int, count: int, dtype: Any) -> Flat:
    rng = np.random.default_rng([7, rank])
    return rng.integers(-4, 5, count).astype(dtype)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.complex128, ml_dtypes.bfloat16])
def test_all_reduce_in_place_stages_nothing(n: int, dtype: Any) -> None:
    count = 1003

    def body(member: Member) -> None:
        whole = allocate(member, count + 10, dtype)
        for offset in (0, 7):  # all of it, and a view at the same place on all
            array = whole[offset : offset + count]
            for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
                if op is not ReduceOp.SUM and np.dtype(dtype).kind in "ic":
                    continue
                inputs = [values(rank, count, dtype) for rank in range(n)]
                array[:] = inputs[member.rank]
                before = untouched(member)
                member.all_reduce(array, op)
                assert untouched(member) == before
                assert np.array_equal(array, reduced(inputs, op.kind.name))
        assert not whole[:0].size

    run_group(SHM, n, body)


@pytest.mark.parametrize("n", [2, 3])
def test_the_bits_are_those_of_private_arrays(n: int) -> None:
    count = 3001

    def body(member: Member) -> None:
        rng = np.random.default_rng(member.rank)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            private = (rng.standard_normal(count) * 100).astype(dtype)
            shared = allocate(member, count, dtype)
            shared[:] = private
            member.all_reduce(private, ReduceOp.SUM)
            member.all_reduce(shared, ReduceOp.SUM)
            assert private.tobytes() == shared.tobytes()

    run_group(SHM, n, body)


@pytest.mark.parametrize("who", ["one private", "another place", "scaled"])
def test_where_not_all_can_be_in_place_the_inputs_are_staged(who: str) -> None:
    n, count = 3, 1500

    def body(member: Member) -> None:
        whole = allocate(member, 2 * count)
        start = count if who == "another place" and member.rank == 1 else 0
        array = whole[start : start + count]
        if who == "one private" and member.rank == 2:
            array = np.empty(count, np.float32)
        array[:] = values(member.rank, count, np.float32)
        op = premul_sum(2.0) if who == "scaled" else ReduceOp.SUM
        member.all_reduce(array, op)
        total = sum(values(rank, count, np.float32) for rank in range(n))
        assert np.array_equal(array, total * (2 if who == "scaled" else 1))

    run_group(SHM, n, body)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("private", [None, 0, 1], ids=["all placed", "0 private", "1 private"])
def test_the_copying_calls_read_where_the_data_is(n: int, private: int | None) -> None:
    count = 5000

    def body(member: Member) -> None:
        rank = member.rank
        mine = np.empty(count * n, np.float32)
        if rank != private:
            mine = allocate(member, count * n)
        else:
            allocate(member, count * n)
        inputs = [mine[i * count : (i + 1) * count] for i in range(n)]
        outputs = [np.empty(count, np.float32) for _ in range(n)]
        parts = [[values(10 * r + i, count, np.float32) for i in range(n)] for r in range(n)]

        def fill() -> None:
            for i in range(n):
                inputs[i][:] = parts[rank][i]

        fill()
        before = untouched(member)
        call = member.call(Kind.ALL_GATHER, np.float32, n * count)
        member.comm.all_gather(call, outputs, inputs[0])
        assert all(np.array_equal(outputs[r], parts[r][0]) for r in range(n))
        call = member.call(Kind.ALL_TO_ALL, np.float32)
        member.comm.all_to_all(call, outputs, inputs)
        assert all(np.array_equal(outputs[r], parts[r][rank]) for r in range(n))
        call = member.call(Kind.REDUCE_SCATTER, np.float32, n * count, ReduceOp.SUM)
        member.comm.reduce_scatter(call, outputs[0], inputs, ReduceOp.SUM)
        assert np.array_equal(outputs[0], sum(parts[r][rank] for r in range(n)))
        if private is None:
            assert untouched(member) == before
        for root in range(n):
            fill()
            call = member.call(Kind.BROADCAST, np.float32, count, root=root)
            member.comm.broadcast(call, inputs[1], root)
            assert np.array_equal(inputs[1], parts[root][1])
        # In place: the input is a part of the output, or the output one of the inputs.
        fill()
        call = member.call(Kind.ALL_GATHER, np.float32, n * count)
        member.comm.all_gather(call, inputs, inputs[rank])
        assert all(np.array_equal(inputs[r], parts[r][r]) for r in range(n))
        member.barrier()
        fill()
        call = member.call(Kind.REDUCE_SCATTER, np.float32, n * count, ReduceOp.SUM)
        member.comm.reduce_scatter(call, inputs[rank], inputs, ReduceOp.SUM)
        assert np.array_equal(inputs[rank], sum(parts[r][rank] for r in range(n)))

    run_group(SHM, n, body)


def test_memory_is_used_again_once_all_members_have_dropped_it() -> None:
    count = 1 << 17

    def body(member: Member) -> None:
        def address(array: Flat) -> int:
            return array.ctypes.data

        first, second = allocate(member, count), allocate(member, count)
        places = {address(first), address(second)}
        view = first[5:10]  # keeps its memory, as any view does
        del first
        gc.collect()
        third = allocate(member, count)
        assert address(third) not in places
        if member.rank == 0:
            del view
        gc.collect()
        fourth = allocate(member, count)
        assert address(fourth) not in places, "rank 1 still has a view of it"
        if member.rank == 1:
            del view
        gc.collect()
        fifth = allocate(member, count)
        assert address(fifth) in places
        fifth[:] = member.rank
        member.all_reduce(fifth, ReduceOp.SUM)
        assert (fifth == 1).all()
        assert not second.any()
        assert not third.any()
        assert not fourth.any()

    run_group(SHM, 2, body)


def test_allocating_for_ever_takes_no_more_memory() -> None:
    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum("meshlib-arena" in line for line in lines)

    def body(member: Member) -> None:
        for turn in range(30):
            array = allocate(member, 50_000 * (1 + turn % 7), np.uint8)
            array[:] = 1
            member.all_reduce(array, ReduceOp.SUM)
            assert (array == 2).all()
            del array
            if member.rank == 0:
                assert mapped() <= 8

    run_group(SHM, 2, body)


def test_odd_sizes_and_dtypes() -> None:
    def body(member: Member) -> None:
        arrays = [
            allocate(member, count, dtype, fill=1)
            for count in (0, 1, 3, 100_000)
            for dtype in (np.bool_, np.int8, np.longdouble, ml_dtypes.float8_e5m2)
        ]
        for array in arrays:
            member.all_reduce(array, ReduceOp.MAX)
            assert (array == np.ones(1).astype(array.dtype)).all()
        assert len({array.ctypes.data for array in arrays if array.size}) == 12

    run_group(SHM, 2, body)


def test_different_sizes_of_memory_are_a_mismatch_on_all_members() -> None:
    def body(member: Member) -> None:
        with pytest.raises(HeaderMismatchError, match=r"count=10.*count=11|count=11.*count=10"):
            allocate(member, 10 + member.rank)

    run_group(SHM, 2, body)


def test_an_array_outlives_its_group() -> None:
    def body(member: Member) -> Flat:
        return allocate(member, 1000, fill=member.rank + 1)

    for rank, array in enumerate(run_group(SHM, 2, body)):
        assert (array == rank + 1).all()


def test_a_group_of_one_has_ordinary_memory() -> None:
    def body(member: Member) -> None:
        array = allocate(member, 10, fill=3)
        member.all_reduce(array, ReduceOp.SUM)
        assert (array == 3).all()

    run_group(SHM, 1, body)
