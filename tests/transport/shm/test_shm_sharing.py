"""Large all_reduces over shared memory: every element, wherever chunks and shares begin and end."""

from __future__ import annotations

import random
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.header import Kind
from transport._communicators.runtime import Membership
from transport._operands.reduce_op import Flat, ReduceOp, premul_sum, reduction_dtype
from transport._shm import ShmCommunicator
from transport._shm.sizes import Sizes

BLOCK = 1 << 9
SIZES = Sizes(block=BLOCK, direct=64, ring=1 << 10)


def _make(membership: Membership, _table: object) -> ShmCommunicator:
    return ShmCommunicator(membership, SIZES)


SHM = Transport("shm", _make, has_links=False)


def _inputs(number: int, size: int, count: int, dtype: Any) -> list[Flat]:
    # Rounding shows in which order they were added.
    rng = np.random.default_rng([number, count])
    if np.dtype(dtype).kind in "iu":
        return [rng.integers(0, 2**31 - 1, count).astype(dtype) for _ in range(size)]
    return [rng.standard_normal(count).astype(dtype) for _ in range(size)]


def _merged(parts: list[Flat], op: ReduceOp) -> Flat:
    """The value of a block of ranks: its lower half's, then its upper half's."""
    if len(parts) == 1:
        return parts[0]
    half = next(2**k for k in range(20) if 2 * 2**k >= len(parts))
    return op.ufunc(_merged(parts[:half], op), _merged(parts[half:], op))


def _in_canonical_order(inputs: list[Flat], op: ReduceOp) -> Flat:
    dtype = inputs[0].dtype
    work = reduction_dtype(dtype)
    parts = [part.astype(work) for part in inputs]
    if op.factor is not None:
        parts = [part * work.type(op.factor) for part in parts]
    total = _merged(parts, op)
    if op.kind.name == "AVG":
        total = total / work.type(len(inputs))
    return total.astype(dtype)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
def test_the_bits_are_those_of_one_tree_whatever_the_size(size: int) -> None:
    half = premul_sum(0.3)

    def body(member: Member) -> None:
        number = 0
        for dtype in (np.float32, np.float64, np.uint32, np.int64, np.float16, ml_dtypes.bfloat16):
            full = BLOCK // np.dtype(dtype).itemsize
            for count in (17, full - 1, full, full + 1, 2 * full + 3, 4 * full, 9 * full + 5):
                number += 1
                inputs = _inputs(number, size, count, dtype)
                scales = np.dtype(dtype).kind not in "iu"
                op = (ReduceOp.SUM, ReduceOp.AVG, half)[number % 3] if scales else ReduceOp.MAX
                if not scales and number % 2:
                    op = ReduceOp.SUM
                got = inputs[member.rank].copy()
                member.all_reduce(got, op)
                wanted = _in_canonical_order(inputs, op)
                assert got.tobytes() == wanted.tobytes(), (dtype, count, op)

    run_group(SHM, size, body)


def test_calls_of_any_kind_follow_each_other_and_no_block_is_used_too_early() -> None:
    size = 3
    same = random.Random(5)
    calls = [(same.randrange(4), same.choice((3, 120, 130, 700, 1500))) for _ in range(150)]

    def body(member: Member) -> None:
        own = random.Random(member.rank)
        for number, (kind, count) in enumerate(calls):
            if own.random() < 0.1:
                time.sleep(0.002)
            rank_values = [np.arange(count, dtype=np.float32) + number + r for r in range(size)]
            buffer = rank_values[member.rank].copy()
            if kind == 3:
                root = number % size
                call = member.call(Kind.BROADCAST, buffer.dtype, count, root=root)
                member.comm.broadcast(call, buffer, root)
                np.testing.assert_array_equal(buffer, rank_values[root])
            else:
                member.all_reduce(buffer, ReduceOp.SUM)
                np.testing.assert_array_equal(buffer, np.sum(rank_values, axis=0))

    run_group(SHM, size, body)
