"""The algorithms' frames and bytes, as docs/inside/algorithms.md states them; and their parts."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import ceil, log2
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport.counting import Count, counting
from tests.support.transport.rank_threads import TINY, Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Thresholds
from transport._inproc.communicator import InprocCommunicator
from transport._operands.flat import Scratch, as_bytes, part_bounds, segments_of
from transport._operands.order import StreamingReduction
from transport._operands.reduce_op import Flat, ReduceOp, premul_sum


def counted(n: int, body: Callable[[Member], Any], table: Thresholds) -> Count:
    """Run ``body`` on ``n`` ranks; return what they sent over links."""
    count = Count()
    run_group(Transport("counting", counting(lambda rank, peer: count)), n, body, table)
    return count


F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
SMALL, LARGE = 5, 1003
TABLE = replace(TINY, segment=256, star_ranks=0)
STAR = replace(TABLE, star=SMALL * 8 * 4, star_ranks=5)


def whole_frames(n: int) -> int:
    """By doubling, or along a tree there and back."""
    return n * steps(n) if n == 2 ** steps(n) else 2 * (n - 1)


def halving_frames(n: int) -> int:
    """Inside the blocks, and from each to the one before it, whose ranks get a frame each."""
    blocks = [2**k for k in range(n.bit_length()) if n & 2**k]
    return sum(m * steps(m) for m in blocks) + sum(blocks[1:])


def steps(n: int) -> int:
    return ceil(log2(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
def test_barrier(n: int) -> None:
    assert counted(n, lambda m: m.barrier(), TABLE) == Count(n * steps(n), 0)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(F32, ReduceOp.AVG), (F32, premul_sum(2.0)), (BF16, ReduceOp.SUM), (BF16, premul_sum(2.0))],
    ids=str,
)
def test_all_reduce(n: int, dtype: np.dtype[Any], op: ReduceOp) -> None:
    def reduce(size: int, table: Thresholds = TABLE) -> Count:
        return counted(n, lambda m: m.all_reduce(np.ones(size, dtype), op), table)

    few = replace(TABLE, pairwise_ranks=n)
    assert reduce(SMALL, few) == Count(whole_frames(n), whole_frames(n) * SMALL * 4)
    assert reduce(0, few) == Count(whole_frames(n), 0)
    chunks = ceil(LARGE * 4 / (n * TABLE.segment))
    sent = LARGE * dtype.itemsize
    first = LARGE * 4 if op == ReduceOp.PREMUL_SUM else sent
    frames = 2 * n * (n - 1) * chunks
    if n > TABLE.pairwise_ranks and dtype == F32:
        frames = 2 * halving_frames(n)
    assert reduce(LARGE) == Count(frames, (n - 1) * (first + sent))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_and_reduce(n: int, root: int) -> None:
    def broadcast(size: int) -> Count:
        def body(m: Member) -> None:
            call = m.call(Kind.BROADCAST, F32, size, root=root)
            m.comm.broadcast(call, np.ones(size, F32), root)

        return counted(n, body, TABLE)

    def reduce(size: int, dtype: np.dtype[Any]) -> Count:
        def body(m: Member) -> None:
            call = m.call(Kind.REDUCE, dtype, size, ReduceOp.SUM, root)
            m.comm.reduce(call, np.ones(size, dtype), ReduceOp.SUM, root)

        return counted(n, body, TABLE)

    chunks = ceil(LARGE * 4 / TABLE.segment)
    assert broadcast(SMALL) == Count(n - 1, (n - 1) * SMALL * 4)
    assert broadcast(LARGE) == Count((n - 1) * (1 if n == 2 else chunks), (n - 1) * LARGE * 4)
    for dtype in (F32, BF16):
        assert reduce(SMALL, dtype) == Count(n - 1, (n - 1) * SMALL * 4)
        found = reduce(LARGE, dtype)
        if n <= 4:
            assert found == Count((n - 1) * chunks, (n - 1) * LARGE * 4)
            continue
        # A part on each member, and all of them but the root's own to the root.
        bounds = [part_bounds(LARGE, n, i) for i in range(n)]
        parts = [dtype.itemsize * (stop - start) for start, stop in bounds]
        frames, sent = n * (n - 1) * ceil(ceil(LARGE / n) * 4 / TABLE.segment), sum(parts)
        more = 0
        if n > TABLE.pairwise_ranks and dtype == F32:
            block = 2 ** (n.bit_length() - 1)
            frames, more = halving_frames(n) + n - block, sum(parts[block:])
        expected = Count(frames + n - 1, (n - 1) * sent + more + sent - parts[root])
        assert found == expected


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_all_gather(n: int) -> None:
    def gather(sizes: list[int]) -> Count:
        def body(m: Member) -> None:
            outputs = [np.empty(size, F32) for size in sizes]
            m.comm.all_gather(m.call(Kind.ALL_GATHER, F32), outputs, np.ones(sizes[m.rank], F32))

        return counted(n, body, TABLE)

    small, large = [i % 2 for i in range(n)], [11 * i for i in range(n)]
    frames = n * steps(n) if n >= TABLE.doubling_ranks else n * (n - 1)
    assert gather(small) == Count(frames, (n - 1) * sum(small) * 4)
    assert gather(large) == Count(n * (n - 1), (n - 1) * sum(large) * 4)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, premul_sum(2.0)], ids=str)
def test_reduce_scatter(n: int, dtype: np.dtype[Any], op: ReduceOp) -> None:
    def scatter(sizes: list[int]) -> Count:
        def body(m: Member) -> None:
            inputs = [np.ones(size, dtype) for size in sizes]
            call = m.call(Kind.REDUCE_SCATTER, dtype, op=op)
            m.comm.reduce_scatter(call, np.empty(sizes[m.rank], dtype), inputs, op)

        return counted(n, body, TABLE)

    small, large = [1] * n, [200 * i for i in range(n)]
    wire = 4 if op == ReduceOp.PREMUL_SUM else dtype.itemsize
    for sizes in (small, large):
        frames, more = n * (n - 1) * ceil(max(sizes) * 4 / TABLE.segment), 0
        if n > TABLE.pairwise_ranks and dtype == F32:
            block = 2 ** (n.bit_length() - 1)
            frames, more = halving_frames(n) + n - block, 4 * sum(sizes[block:])
        assert scatter(sizes) == Count(frames, (n - 1) * sum(sizes) * wire + more)


@pytest.mark.parametrize("n", [4, 5, 8])
def test_a_small_reduce_scatter(n: int) -> None:
    def body(m: Member) -> None:
        inputs = [np.full(1, i + m.rank, BF16) for i in range(n)]
        output = np.empty(1, BF16)
        call = m.call(Kind.REDUCE_SCATTER, BF16, op=ReduceOp.SUM)
        m.comm.reduce_scatter(call, output, inputs, ReduceOp.SUM)
        assert output == n * m.rank + n * (n - 1) // 2

    table = replace(TABLE, pairwise_ranks=n)
    assert counted(n, body, table) == Count(whole_frames(n), whole_frames(n) * n * 4)


@pytest.mark.parametrize("n", [3, 4, 5])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_star(n: int, dtype: np.dtype[Any]) -> None:
    """Everything meets at rank 0; parts of different sizes too."""
    sizes = [SMALL * (i % 3) for i in range(n)]
    op = premul_sum(2.0)

    def gather(m: Member) -> None:
        outputs = [np.empty(size, dtype) for size in sizes]
        own = np.full(sizes[m.rank], m.rank, dtype)
        m.comm.all_gather(m.call(Kind.ALL_GATHER, dtype), outputs, own)
        assert [output.tolist() for output in outputs] == [[i] * sizes[i] for i in range(n)]

    def scatter(m: Member) -> None:
        inputs = [np.full(size, i, dtype) for i, size in enumerate(sizes)]
        output = np.empty(sizes[m.rank], dtype)
        m.comm.reduce_scatter(m.call(Kind.REDUCE_SCATTER, dtype, op=op), output, inputs, op)
        assert output.tolist() == [2 * n * m.rank] * sizes[m.rank]

    def reduce(m: Member) -> None:
        buffer = np.full(SMALL, m.rank, dtype)
        m.all_reduce(buffer, op)
        assert buffer.tolist() == [n * (n - 1)] * SMALL

    frames, all_bytes = 2 * (n - 1), sum(sizes) * dtype.itemsize
    assert counted(n, lambda m: m.barrier(), STAR) == Count(frames, 0)
    assert counted(n, reduce, STAR) == Count(frames, frames * SMALL * 4)
    own = sizes[0] * dtype.itemsize
    assert counted(n, gather, STAR) == Count(frames, all_bytes - own + (n - 1) * all_bytes)
    wide = 4 * sum(sizes)
    assert counted(n, scatter, STAR) == Count(frames, (n - 1) * wide + wide - 4 * sizes[0])


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, LARGE])
def test_gather_scatter_and_all_to_all(n: int, size: int) -> None:
    def arrays() -> list[Flat]:
        return [np.ones(size + i, F32) for i in range(n)]

    def gather(m: Member) -> None:
        outputs = arrays() if m.rank == 0 else None
        m.comm.gather(m.call(Kind.GATHER, F32, root=0), outputs, np.ones(size + m.rank, F32), 0)

    def scatter(m: Member) -> None:
        inputs = arrays() if m.rank == 0 else None
        m.comm.scatter(m.call(Kind.SCATTER, F32, root=0), np.ones(size + m.rank, F32), inputs, 0)

    def all_to_all(m: Member) -> None:
        outputs = [np.ones(size + m.rank, F32) for _ in range(n)]
        m.comm.all_to_all(m.call(Kind.ALL_TO_ALL, F32), outputs, arrays())

    without_root = sum(4 * (size + i) for i in range(1, n))
    assert counted(n, gather, TABLE) == Count(n - 1, without_root)
    assert counted(n, scatter, TABLE) == Count(n - 1, without_root)
    total = (n - 1) * (without_root + 4 * size)
    assert counted(n, all_to_all, TABLE) == Count(n * (n - 1), total)


@pytest.mark.parametrize("dtype", [F32, BF16, np.dtype(np.complex128)], ids=str)
def test_scratch_memory_stays_bounded(dtype: np.dtype[Any]) -> None:
    """Nothing grows with the array, in scratch or out of it, and small calls keep nothing more."""
    n, size, bound = 2, (24 << 20) // dtype.itemsize, 4 * DEFAULT.segment
    gate = threading.Barrier(n, timeout=30)

    def body(m: Member) -> int:
        buffer = np.ones(size, dtype)
        small = np.ones(2, dtype)
        m.all_reduce(small, ReduceOp.SUM)
        gate.wait()
        if m.rank == 0:
            tracemalloc.start()
        gate.wait()
        m.all_reduce(buffer, ReduceOp.SUM)
        m.comm.reduce(m.call(Kind.REDUCE, dtype, size), buffer, ReduceOp.SUM, 1)
        halves = [buffer[: size // 2], buffer[size // 2 :]]
        output = halves[m.rank]
        m.comm.reduce_scatter(m.call(Kind.REDUCE_SCATTER, dtype), output, halves, ReduceOp.SUM)
        gate.wait()
        peak = tracemalloc.get_traced_memory()[1]
        gate.wait()
        if m.rank == 0:
            tracemalloc.stop()
        assert m.comm.scratch.nbytes <= bound + 2 * DEFAULT.all_reduce_doubling
        return peak

    try:
        peaks = run_group(Transport("inproc", InprocCommunicator), n, body)
    finally:
        tracemalloc.stop()
    assert max(peaks) <= n * bound + (2 << 20)


@given(count=st.integers(0, 10**12), parts=st.integers(1, 1000))
def test_parts_cover_everything_evenly(count: int, parts: int) -> None:
    bounds = [part_bounds(count, parts, i) for i in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    sizes = {stop - start for start, stop in bounds}
    assert max(sizes) - min(sizes) <= 1


@given(nbytes=st.integers(0, 10**9), segment=st.integers(1, 10**6))
def test_laps_are_enough_and_no_more(nbytes: int, segment: int) -> None:
    chunks = segments_of(nbytes, segment)
    assert chunks * segment >= nbytes
    assert chunks == 1 or (chunks - 1) * segment < nbytes


@given(
    size=st.integers(0, 50),
    arrivals=st.lists(st.integers(0, 50 * 8)),
    piece=st.integers(1, 500),
    dtype=st.sampled_from([np.float64, np.int16, np.uint8, np.complex128]),
)
@settings(max_examples=200)
def test_an_arriving_frame_is_reduced_once_whatever_its_pieces(
    size: int, arrivals: list[int], piece: int, dtype: Any
) -> None:
    own, out = np.full(size, 2, dtype), np.zeros(size, dtype)
    adding = StreamingReduction(Scratch(), ReduceOp.SUM, ((True,),), own, out, piece)
    arriving, on_piece = adding.expect(out.dtype)
    arriving[:] = np.arange(size).astype(dtype)
    for received in sorted(min(a, arriving.nbytes) for a in arrivals):
        if on_piece is not None:
            on_piece(received)
        done = received // out.itemsize
        assert not out[done:].any()
    adding.add()
    assert np.array_equal(out, arriving + own)


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_an_overflow_is_an_answer_whatever_the_user_set(elements: int) -> None:
    def body(member: Member) -> None:
        most = np.finfo(np.float32).max
        with np.errstate(all="raise"):
            for _ in range(2):
                buffer = np.full(elements, most, np.float32)
                member.all_reduce(buffer, ReduceOp.SUM)
                assert np.isinf(buffer).all()
                inputs = [np.full(elements, most, np.float32) for _ in range(member.size)]
                call = member.call(Kind.REDUCE_SCATTER, F32, elements, ReduceOp.SUM)
                member.comm.reduce_scatter(call, buffer, inputs, ReduceOp.SUM)
                assert np.isinf(buffer).all()
                call = member.call(Kind.REDUCE, F32, elements, ReduceOp.SUM, root=0)
                member.comm.reduce(call, inputs[0], ReduceOp.SUM, 0)
            assert set(np.geterr().values()) == {"raise"}

    run_group(Transport("inproc", InprocCommunicator), 2, body, TABLE)


def test_scratch_is_reused_between_dtypes_and_never_shared_between_slots() -> None:
    scratch = Scratch()
    first = scratch.flat(0, F32, 100)
    first[:] = 1
    other = scratch.flat(1, F32, 100)
    other[:] = 2
    assert (first == 1).all()
    held = scratch.nbytes
    for dtype in (np.float64, np.complex128, np.longdouble, BF16, ml_dtypes.float8_e5m2):
        view = scratch.flat(0, np.dtype(dtype), 16)
        assert view.dtype == dtype
        assert view.size == 16
        assert np.shares_memory(view, first)
        assert not np.shares_memory(view, other)
    assert scratch.nbytes == held
    grown = scratch.flat(0, F32, 10_000)
    assert grown.size == 10_000
    assert scratch.flat(0, np.dtype(np.int64), 5_000).size == 5_000


@pytest.mark.parametrize("dtype", [np.bool_, np.longdouble, np.complex64, BF16, np.int8])
@pytest.mark.parametrize("size", [0, 1, 7])
def test_as_bytes_shares_memory(dtype: Any, size: int) -> None:
    array = np.zeros(size, dtype)
    view = as_bytes(array)
    assert (view.format, view.nbytes, view.readonly) == ("B", array.nbytes, False)
    if size:
        view[0] = 1
        assert array.tobytes()[0] == 1
