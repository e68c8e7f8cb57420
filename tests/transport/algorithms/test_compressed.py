"""Compressed reductions: the same bits on every member, near the sum, fewer bytes, no loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.net.far_links import FarInprocCommunicator
from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._algorithms.compressed import LEAST_BYTES
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._inproc.communicator import InprocCommunicator
from transport._operands.compression import Compression
from transport._operands.reduce_op import ReduceOp, error_feedback

TABLE = Thresholds(segment=32 << 10)
SIZE = 50_001  # several laps, whose parts differ in size
RTOL = {"bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 1 / 254}


def transport(name: str | None, far_bytes: int = 0) -> Transport:
    """Members whose large reductions travel as ``name``, over links with or without delay."""
    compression = None if name is None else Compression(name)

    def make(membership: Any, table: Thresholds) -> InprocCommunicator:
        membership = replace(membership, compression=compression)
        if not far_bytes:
            return InprocCommunicator(membership, table)
        return FarInprocCommunicator(membership, table, lambda rank, peer: far_bytes)

    return Transport("compressed", make)


def values(rank: int, size: int = SIZE, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


def every_result(m: Member) -> list[Any]:
    found = list[Any]()
    for dtype in (np.float32, np.float64, np.float16):
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            buffer = values(m.rank, dtype=dtype)
            m.all_reduce(buffer, op)
            inputs = [values(10 * m.rank + i, SIZE + 7 * i, dtype) for i in range(m.size)]
            kept = [part.copy() for part in inputs]
            output = np.empty_like(inputs[m.rank])
            m.comm.reduce_scatter(m.call(Kind.REDUCE_SCATTER, dtype), output, inputs, op)
            assert [part.tobytes() for part in inputs] == [part.tobytes() for part in kept]
            found += [buffer, output]
    return found


@pytest.mark.parametrize(("name", "n"), [("bf16", 2), ("fp8", 3), ("int8", 2), ("int8", 4)])
def test_all_have_the_same_bits_near_the_sum(name: str, n: int) -> None:
    results = run_group(transport(name), n, every_result, TABLE)
    exact = run_group(transport(None), n, every_result, TABLE)
    bound = RTOL[name] * 6 * n * 2  # of the largest number of a block, in each of two roundings
    for mine, plain in zip(results, exact, strict=True):
        for number, (one, other) in enumerate(zip(mine, plain, strict=True)):
            scale = 1 if number // 2 % 2 == 0 else 1 / n
            np.testing.assert_allclose(one, other, rtol=0, atol=bound * scale)
    for i in range(0, len(results[0]), 2):
        assert len({mine[i].tobytes() for mine in results}) == 1
    changed = [not np.array_equal(results[0][i], exact[0][i]) for i in range(4)]
    assert all(changed)  # it was compressed


@pytest.mark.parametrize(("n", "under_way"), [(2, 1 << 20), (3, 32 << 10)])
def test_the_bits_are_the_same_where_frames_leave_ahead(n: int, under_way: int) -> None:
    def bits(transport: Transport) -> list[list[bytes]]:
        found = run_group(transport, n, every_result, TABLE)
        return [[array.tobytes() for array in mine] for mine in found]

    assert bits(transport("int8", under_way)) == bits(transport("int8"))


def frame_bytes(m: Member) -> int:
    m.all_reduce(values(m.rank, 1 << 16), ReduceOp.SUM)
    assert isinstance(m.comm, FarInprocCommunicator)
    return sum(nbytes for what, _, nbytes in m.comm.log if what == "post")


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.5), ("fp8", 0.254), ("int8", 0.254)])
def test_the_bytes_on_the_wire(name: str, share: float) -> None:
    n, whole = 4, 4 << 16
    for sent in run_group(transport(name, 1 << 20), n, frame_bytes, TABLE):
        assert sent == pytest.approx(share * 2 * whole * (n - 1) / n, rel=0.002)


NOT_COMPRESSED = [
    (ReduceOp.MAX, np.float32, SIZE),
    (ReduceOp.PRODUCT, np.float32, SIZE),
    (ReduceOp.SUM, np.int32, SIZE),
    (ReduceOp.SUM, np.complex64, SIZE),
    (ReduceOp.SUM, ml_dtypes.float8_e4m3fn, 2 * LEAST_BYTES),
    (ReduceOp.SUM, np.float32, LEAST_BYTES // 4 - 1),
]


@pytest.mark.parametrize(("op", "dtype", "size"), NOT_COMPRESSED)
def test_what_is_not_compressed_is_exact(op: ReduceOp, dtype: Any, size: int) -> None:
    def body(m: Member) -> bytes:
        buffer = values(m.rank, size, dtype)
        m.all_reduce(buffer, op)
        return buffer.tobytes()

    assert run_group(transport("int8"), 3, body, TABLE) == run_group(
        transport(None), 3, body, TABLE
    )


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_with_error_feedback_nothing_is_lost_but_delayed(name: str, op: ReduceOp) -> None:
    n, calls = 3, 4

    def body(m: Member) -> tuple[Any, Any, Any]:
        residual = np.zeros(SIZE, np.float32)
        put_in, got = np.zeros(SIZE), np.zeros(SIZE)
        for number in range(calls):
            buffer = values(100 * number + m.rank)
            put_in += buffer
            m.all_reduce(buffer, error_feedback(op, residual))
            got += buffer
        return put_in, got, residual

    found = run_group(transport(name), n, body, TABLE)
    total = sum(put_in for put_in, _, _ in found)
    left = sum(residual.astype(np.float64) for _, _, residual in found)
    divisor = n if op is ReduceOp.AVG else 1
    for _, got, _ in found:
        np.testing.assert_allclose(got * divisor + left, total, atol=1e-4)
        assert np.abs(got * divisor - total).max() > 1e-2  # which the residuals make good


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("strange", [np.nan, np.inf, 3.4028235e38])
@pytest.mark.parametrize("name", ["bf16", "fp8", "int8"])
def test_where_a_result_is_no_number_all_keep_what_they_had(name: str, strange: float) -> None:
    """Whosever input it is: as after a step that a loss scaler skips."""

    def body(m: Member) -> tuple[Any, Any, Any, Any]:
        residual = values(100 + m.rank)
        before = residual.copy()
        buffer = values(m.rank)
        if m.rank == 0:
            buffer[::9973] = strange
        put_in = buffer.astype(np.float64) + residual
        m.all_reduce(buffer, error_feedback(ReduceOp.SUM, residual))
        return buffer, before, residual, put_in

    found = run_group(transport(name), 3, body, TABLE)
    finite = np.isfinite(found[0][0])
    strange_ones = SIZE // 9973 + 1
    assert finite.any()
    if strange != 3.4028235e38 or name == "bf16":  # which rounds that one up
        assert np.count_nonzero(~finite) >= strange_ones
    for _, before, residual, _ in found:
        np.testing.assert_array_equal(residual[~finite], before[~finite])
    left = sum(residual.astype(np.float64) for _, _, residual, _ in found)
    total = sum(put_in for _, _, _, put_in in found)
    large = np.abs(total) > 1e30
    whole = finite & ~large
    np.testing.assert_allclose((found[0][0] + left)[whole], total[whole], atol=1e-4)


def descent(feedback: bool) -> float:
    """How far SGD on a quadratic stays from the optimum, as a share of the way.

    A few numbers of each block are large and swing to and fro: next to them, int8 rounds the
    others' gradients to nothing.
    """

    def body(m: Member) -> float:
        size = LEAST_BYTES // 4
        swinging = np.arange(size) % 64 == 0
        optimum = np.where(swinging, 0, values(0, size)).astype(np.float32)
        x, residual = np.zeros(size, np.float32), np.zeros(size, np.float32)
        op = error_feedback(ReduceOp.AVG, residual) if feedback else ReduceOp.AVG
        for step in range(150):
            gradient = x - optimum
            gradient[swinging] = 500.0 * (-1) ** step
            m.all_reduce(gradient, op)
            x -= np.float32(0.05) * gradient
        left = np.where(swinging, 0, x - optimum)
        return float(np.linalg.norm(left) / np.linalg.norm(optimum))

    first, second = run_group(transport("int8"), 2, body, TABLE)
    assert first == second
    return first


def test_error_feedback_converges_where_int8_alone_does_not() -> None:
    assert descent(feedback=False) > 0.9
    assert descent(feedback=True) < 0.1
