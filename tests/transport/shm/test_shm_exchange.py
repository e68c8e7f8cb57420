"""The exchanges through shared memory: many shapes, again and again, and arrays with gaps."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.header import Kind
from transport._communicators.runtime import Membership
from transport._errors import HeaderMismatchError
from transport._operands.reduce_op import ReduceOp
from transport._shm import ShmCommunicator
from transport._shm.sizes import Sizes

# Shares of 8 to 64 elements of 8 bytes, so that some calls take many chunks.
SIZES = Sizes(block=512, direct=64, ring=1 << 10)
DTYPES = np.uint8, np.float16, np.float64


def _make(membership: Membership, _table: object) -> ShmCommunicator:
    return ShmCommunicator(membership, SIZES)


SHM = Transport("shm", _make, has_links=False)


def _values(src: int, dst: int, call: int, count: int, dtype: Any) -> Any:
    return ((np.arange(count) + 7 * src + 3 * dst + call) % 11).astype(dtype)


def _all_to_all(member: Member, number: int, counts: list[list[int]], dtype: Any) -> None:
    rank, size = member.rank, member.size
    inputs = [_values(rank, dst, number, counts[rank][dst], dtype) for dst in range(size)]
    outputs = [np.zeros(counts[src][rank], dtype) for src in range(size)]
    member.comm.all_to_all(member.call(Kind.ALL_TO_ALL, dtype), outputs, inputs)
    for src, output in enumerate(outputs):
        wanted = _values(src, rank, number, counts[src][rank], dtype)
        np.testing.assert_array_equal(output, wanted)


def _all_gather(member: Member, number: int, counts: list[int], dtype: Any) -> None:
    outputs = [np.zeros(count, dtype) for count in counts]
    own = _values(member.rank, 0, number, counts[member.rank], dtype)
    member.comm.all_gather(member.call(Kind.ALL_GATHER, dtype), outputs, own)
    for src, output in enumerate(outputs):
        np.testing.assert_array_equal(output, _values(src, 0, number, counts[src], dtype))


def _reduce_scatter(member: Member, number: int, count: int, dtype: Any) -> None:
    rank, size, op = member.rank, member.size, ReduceOp.MAX
    inputs = [_values(rank, dst, number, count, dtype) for dst in range(size)]
    output = np.zeros(count, dtype)
    call = member.call(Kind.REDUCE_SCATTER, dtype, count, op)
    member.comm.reduce_scatter(call, output, inputs, op)
    wanted = np.max([_values(src, rank, number, count, dtype) for src in range(size)], axis=0)
    np.testing.assert_array_equal(output, wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_many_shapes_in_any_order_many_times(size: int) -> None:
    def body(member: Member) -> None:
        same = random.Random(size)  # all members make the same calls
        shapes: list[tuple[int, Any, list[list[int]]]] = []
        for kind in range(70):
            # Equal sizes, sizes of which some take one chunk and others many, and large ones.
            most = same.choice((9, 150, 1500))
            count = same.randrange(most)
            counts = [[count] * size for _ in range(size)]
            if kind % 2:
                counts = [[same.randrange(most) for _ in range(size)] for _ in range(size)]
            shapes.append((kind % 3, same.choice(DTYPES), counts))
        order = shapes + same.choices(shapes[:8], k=60) + shapes[::-1]
        for number, (kind, dtype, counts) in enumerate(order):
            if kind == 0:
                _all_to_all(member, number, counts, dtype)
            elif kind == 1:
                _all_gather(member, number, counts[0], dtype)
            else:
                _reduce_scatter(member, number, counts[0][0], dtype)

    run_group(SHM, size, body)


@pytest.mark.parametrize("differs", ["sent", "expected"])
def test_sizes_that_disagree_are_found_after_calls_of_the_same_shape_that_did_not(
    differs: str,
) -> None:
    def body(member: Member) -> None:
        peer = 1 - member.rank
        for number in range(3):
            _all_to_all(member, number, [[5, 5], [5, 5]], np.float64)
        inputs = [np.zeros(5), np.zeros(5)]
        outputs = [np.zeros(5), np.zeros(5)]
        if member.rank == 1:
            (inputs if differs == "sent" else outputs)[0] = np.zeros(4)
        text = {
            ("sent", 0): "sent 32 bytes .* expected 40",
            ("sent", 1): "expects 40 bytes .* got 32 bytes",
            ("expected", 0): "expects 32 bytes .* got 40 bytes",
            ("expected", 1): "sent 40 bytes .* expected 32",
        }[differs, member.rank]
        with pytest.raises(HeaderMismatchError, match=text) as caught:
            member.comm.all_to_all(member.call(Kind.ALL_TO_ALL, np.float64), outputs, inputs)
        assert caught.value.peer == peer

    run_group(SHM, 2, body)


def _with_gaps(rng: random.Random, values: Any) -> Any:
    """Return ``values`` in an array of as many dims, which lies in a larger one, or turned."""
    turned = rng.sample(range(values.ndim), values.ndim)
    steps = [rng.choice((1, 1, 1, 2, -1)) for _ in turned]
    lengths = [abs(step) * values.shape[d] for d, step in zip(turned, steps, strict=True)]
    room = np.full([length + 2 for length in lengths], 99, values.dtype)
    part = room[tuple(slice(1, 1 + length) for length in lengths)]
    part = part[tuple(slice(None, None, step) for step in steps)].transpose(np.argsort(turned))
    part[...] = values
    return part


def _exchange_with_gaps(
    member: Member, number: int, shape: tuple[int, ...], dtype: Any, gather: bool
) -> None:
    rank, size, count = member.rank, member.size, math.prod(shape)
    rng = random.Random(f"{rank} {number}")  # how arrays lie is each member's own matter

    def values(src: int, dst: int) -> Any:
        return _values(src, 0 if gather else dst, number, count, dtype)

    def laid(flat: Any) -> Any:
        return flat if rng.random() < 0.3 else _with_gaps(rng, flat.reshape(shape))

    outputs = [laid(np.zeros(count, dtype)) for _ in range(size)]
    if gather:
        call = member.call(Kind.ALL_GATHER, dtype)
        member.comm.all_gather(call, outputs, laid(values(rank, 0)))
    else:
        call = member.call(Kind.ALL_TO_ALL, dtype)
        member.comm.all_to_all(call, outputs, [laid(values(rank, dst)) for dst in range(size)])
    for src, output in enumerate(outputs):
        np.testing.assert_array_equal(output.reshape(-1), values(src, rank))
        room = output.base
        if room is not None:  # nothing was written beside it
            assert np.count_nonzero(room == 99) >= room.size - output.size


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_that_do_not_lie_in_one_piece(size: int) -> None:
    def body(member: Member) -> None:
        same = random.Random(size)
        for number in range(60):
            most, least = same.choice((2, 5, 9)), min(number % 7, 1)
            shape = tuple(same.randint(least, most) for _ in range(same.choice((2, 3, 4))))
            _exchange_with_gaps(member, number, shape, same.choice(DTYPES), number % 3 == 0)

    run_group(SHM, size, body)


def test_a_members_own_part_goes_from_one_shape_to_another() -> None:
    shapes = (6, 4), (2, 12), (3, 2, 4), (24,)

    def body(member: Member) -> None:
        for number, shape in enumerate(shapes * 2):
            rng = random.Random(number)
            inputs = [
                _with_gaps(rng, _values(member.rank, dst, number, 24, np.float64).reshape(shape))
                for dst in range(2)
            ]
            outputs = [_with_gaps(rng, np.zeros(rng.choice(shapes))) for _ in range(2)]
            member.comm.all_to_all(member.call(Kind.ALL_TO_ALL, np.float64), outputs, inputs)
            for src, output in enumerate(outputs):
                wanted = _values(src, member.rank, number, 24, np.float64)
                np.testing.assert_array_equal(output.reshape(-1), wanted)

    run_group(SHM, 2, body)


def test_parts_that_are_read_in_place_into_arrays_with_gaps() -> None:
    def body(member: Member) -> None:
        rank, size, shape = member.rank, member.size, (40, 30)
        flat = member.comm.allocate(member.call(Kind.BARRIER), size * 1200, np.dtype(np.float64))
        inputs = [flat[dst * 1200 : (dst + 1) * 1200] for dst in range(size)]
        for dst, input_ in enumerate(inputs):
            input_[...] = _values(rank, dst, 0, 1200, np.float64)
        rng = random.Random(rank)
        outputs = [_with_gaps(rng, np.zeros(shape)) for _ in range(size)]
        member.comm.all_to_all(member.call(Kind.ALL_TO_ALL, np.float64), outputs, inputs)
        for src, output in enumerate(outputs):
            wanted = _values(src, rank, 0, 1200, np.float64)
            np.testing.assert_array_equal(output.reshape(-1), wanted)

    run_group(SHM, 3, body)


def test_arrays_of_many_dims() -> None:
    def body(member: Member) -> None:
        whole = np.arange(2.0 * 3**9).reshape([3] * 9 + [2])
        part = whole[tuple([slice(0, 2)] * 9 + [slice(0, 1)])]
        outputs = [np.zeros(part.size), np.zeros(part.size)]
        call = member.call(Kind.ALL_TO_ALL, np.float64)
        member.comm.all_to_all(call, outputs, [part, part])
        for output in outputs:
            np.testing.assert_array_equal(output, part.reshape(-1))

    run_group(SHM, 2, body)
