"""Values: every collective, op, dtype, size, root and group size, on every transport.

All the cases of one group size run one after the other in one group, so that thousands of them
take seconds; a failure names its case and rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations, cycle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.transport.collective_oracle import reduced
from tests.support.transport.rank_threads import TINY, Member, Transport, run_group
from transport._calls.header import Kind
from transport._operands.reduce_op import Flat, ReduceOp, premul_sum

GROUP_SIZES = (1, 2, 3, 4, 5, 7)
NATIVE = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 longdouble"
    " complex64 complex128 clongdouble"
)
EXTENDED = (
    "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2fnuz"
    " float8_e3m4 float8_e4m3 float8_e8m0fnu"
)
DTYPES = [np.dtype(name) for name in NATIVE.split(" ")]
DTYPES += [np.dtype(getattr(ml_dtypes, name)) for name in EXTENDED.split(" ")]
MAIN_DTYPES = [np.dtype("float32"), np.dtype("int64"), np.dtype(ml_dtypes.bfloat16)]
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
# With TINY thresholds: below and above every one, with and without remainders.
SIZES = (0, 1, 3, 5, 41, 203)


@dataclass(frozen=True)
class Case:
    """One collective call: ``sizes[i]`` elements for member i (one number where all agree)."""

    number: int
    kind: Kind
    dtype: np.dtype[Any]
    sizes: tuple[int, ...]
    op: str = ""
    root: int = 0
    in_place: bool = False

    def values(self, rank: int, part: int = 0) -> Flat:
        """The input of ``rank`` (for member ``part``): values whose sums and products are exact."""
        return _drawn(self, rank, part).copy()

    def _draw(self, rank: int, part: int) -> Flat:
        rng = np.random.default_rng([self.number, rank, part])
        size = self.sizes[part]
        if self.dtype.kind == "b":
            return rng.random(size) < 0.5
        if self.dtype.kind in "iu":
            info = np.iinfo(self.dtype)
            return rng.integers(info.min, info.max, size, self.dtype, endpoint=True)
        if self.op == "PRODUCT" or self.dtype.name == "float8_e8m0fnu":
            numbers = rng.choice([0.5, 1.0, 2.0], size)
        else:
            numbers = rng.integers(-4, 5, size).astype(np.float64)
        if self.dtype.kind == "c":
            imaginary = np.zeros(size) if self.op == "PRODUCT" else rng.integers(-4, 5, size)
            return (numbers + 1j * imaginary).astype(self.dtype)
        return numbers.astype(self.dtype)

    def reduce_op(self, rank: int) -> ReduceOp:
        if self.op == "PREMUL_SUM":
            return premul_sum(factor(rank))
        return ReduceOp.__dict__.get(self.op) or getattr(ReduceOp, self.op)


@lru_cache(maxsize=1 << 17)  # every transport asks for the same ones
def _drawn(case: Case, rank: int, part: int) -> Flat:
    return case._draw(rank, part)


def factor(rank: int) -> float:
    """PREMUL_SUM's factors differ by rank and are exact in every float."""
    return (0.5, 2.0, -1.0)[rank % 3]


def applies(op: str, dtype: np.dtype[Any]) -> bool:
    kind = (ReduceOp.SUM if op == "PREMUL_SUM" else getattr(ReduceOp, op)).kind.name
    if kind in ("BAND", "BOR", "BXOR"):
        return dtype.kind in "biu"
    if op in ("AVG", "PREMUL_SUM"):
        return dtype.kind not in "biu"
    return not (op in ("MIN", "MAX") and dtype.kind == "c")


def make_cases(n: int) -> list[Case]:
    """The table for groups of ``n``: everything for the main dtypes, each dtype with each op.

    Arithmetic does not depend on how many members there are: two sizes show all dtypes.
    """
    numbers = iter(range(1 << 30))
    cases: list[Case] = []

    def add(kind: Kind, dtype: np.dtype[Any], sizes: tuple[int, ...], **more: Any) -> None:
        cases.append(Case(next(numbers), kind, dtype, sizes, **more))

    sizes, roots = cycle(SIZES), cycle(range(n))
    uneven = [
        tuple((base + step * i) % 23 for i in range(n)) for base, step in ((0, 0), (0, 7), (5, 11))
    ] + [tuple(150 if i == n - 1 else i % 2 for i in range(n))]
    shapes = cycle(uneven)
    for dtype in DTYPES if n in (2, 3) else MAIN_DTYPES:
        for op in OPS:
            if applies(op, dtype):
                for _ in range(2):
                    add(Kind.ALL_REDUCE, dtype, (next(sizes),), op=op)
                    add(Kind.REDUCE, dtype, (next(sizes),), op=op, root=next(roots))
                add(Kind.REDUCE_SCATTER, dtype, next(shapes), op=op)
        for kind in (Kind.BROADCAST,):
            add(kind, dtype, (next(sizes),), root=next(roots))
        for kind in (Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALL_TO_ALL):
            add(kind, dtype, next(shapes), root=next(roots))
    for dtype in MAIN_DTYPES:
        some_roots = range(n) if dtype.name == "float32" else (n - 1,)
        for size in SIZES:
            for op in ("SUM", "MAX", "AVG", "PREMUL_SUM"):
                if applies(op, dtype):
                    add(Kind.ALL_REDUCE, dtype, (size,), op=op)
            for root in some_roots:
                add(Kind.BROADCAST, dtype, (size,), root=root)
                add(Kind.REDUCE, dtype, (size,), op="SUM", root=root)
        for shape in [*uneven, *((size,) * n for size in SIZES)]:
            for in_place in (False, True):
                add(Kind.ALL_GATHER, dtype, shape, in_place=in_place)
                add(Kind.REDUCE_SCATTER, dtype, shape, op="SUM", in_place=in_place)
            add(Kind.ALL_TO_ALL, dtype, shape)
            for root in some_roots:
                add(Kind.GATHER, dtype, shape, root=root)
                add(Kind.SCATTER, dtype, shape, root=root)
    return cases


def covering(cases: list[Case], whole: bool) -> list[Case]:
    """Return cases with all pairs of values that occur in ``cases``, such as a dtype and a root.

    Or, not ``whole``, the pairs of a kind of call and a value. Every pair has been in one call,
    with some others; that every three meet is left to chance.
    """
    seen: set[Any] = set()
    kept: list[Case] = []
    for case in cases:
        values = {
            "kind": case.kind,
            "dtype": case.dtype,
            "op": case.op,
            "root": case.root,
            "sizes": case.sizes,
            "in place": case.in_place,
        }
        pairs = set(combinations(values.items(), 2))
        if not whole:
            pairs = {pair for pair in pairs if pair[0][0] == "kind"}
        if not pairs <= seen:
            seen |= pairs
            kept.append(case)
    return kept


@cache
def table(n: int, whole: bool) -> list[tuple[Case, list[Any]]]:
    """The cases for groups of ``n``, each with what every member must end up with."""
    return [(case, expect(case, n)) for case in covering(make_cases(n), whole)]


def same(left: Flat, right: Flat) -> bool:
    """Equal element by element, NaN being equal to NaN."""
    return bool(np.all((left == right) | ((left != left) & (right != right))))


def expect(case: Case, n: int) -> list[Any]:
    """The expected result of every member, by rank (None: no result)."""
    factors = [factor(rank) for rank in range(n)] if case.op == "PREMUL_SUM" else None
    match case.kind:
        case Kind.ALL_REDUCE:
            total = reduced([case.values(r) for r in range(n)], case.op, factors)
            return [total] * n
        case Kind.REDUCE:
            total = reduced([case.values(r) for r in range(n)], case.op, factors)
            return [total if r == case.root else case.values(r) for r in range(n)]
        case Kind.BROADCAST:
            return [case.values(case.root)] * n
        case Kind.REDUCE_SCATTER:
            return [
                reduced([case.values(r, part) for r in range(n)], case.op, factors)
                for part in range(n)
            ]
        case Kind.SCATTER:
            return [case.values(case.root, part) for part in range(n)]
        case Kind.ALL_GATHER | Kind.GATHER:
            everything = [case.values(r, r) for r in range(n)]
            if case.kind is Kind.ALL_GATHER:
                return [everything] * n
            return [everything if r == case.root else None for r in range(n)]
        case Kind.ALL_TO_ALL:
            return [[_crossing(case, src, dst) for src in range(n)] for dst in range(n)]
        case _:
            raise AssertionError(case.kind)


def _crossing(case: Case, src: int, dst: int) -> Flat:
    """The part that ``src`` sends to ``dst`` in an all_to_all: sizes depend on both."""
    return case.values(src, (src + 2 * dst) % len(case.sizes))


def perform(member: Member, case: Case) -> Any:
    """Make the call on one member; return what it ends up with. Asserts that inputs survive."""
    rank, n, comm = member.rank, member.size, member.comm
    kind, dtype = case.kind, case.dtype
    op = case.reduce_op(rank) if case.op else None
    call = member.call(
        kind,
        dtype,
        elements=case.sizes[0] if len(case.sizes) == 1 else 0,
        op=op,
        root=case.root,
    )
    match kind:
        case Kind.ALL_REDUCE | Kind.REDUCE | Kind.BROADCAST:
            buffer = case.values(rank)
            if kind is Kind.BROADCAST:
                if rank == case.root:
                    buffer.flags.writeable = False
                comm.broadcast(call, buffer, case.root)
            elif kind is Kind.REDUCE:
                assert op is not None
                if rank != case.root:
                    buffer.flags.writeable = False
                comm.reduce(call, buffer, op, case.root)
            else:
                assert op is not None
                comm.all_reduce(call, buffer, op)
            return buffer
        case Kind.ALL_GATHER:
            outputs = [np.empty(size, dtype) for size in case.sizes]
            own = case.values(rank, rank)
            if case.in_place:
                outputs[rank][:] = own
                own = outputs[rank][:]
            comm.all_gather(call, outputs, own)
            return outputs
        case Kind.GATHER:
            outputs = [np.empty(size, dtype) for size in case.sizes] if rank == case.root else None
            comm.gather(call, outputs, case.values(rank, rank), case.root)
            return outputs
        case Kind.SCATTER:
            inputs = [case.values(rank, part) for part in range(n)]
            output = np.empty(case.sizes[rank], dtype)
            comm.scatter(call, output, inputs if rank == case.root else None, case.root)
            return output
        case Kind.REDUCE_SCATTER:
            assert op is not None
            inputs = [case.values(rank, part) for part in range(n)]
            output = inputs[rank] if case.in_place else np.empty(case.sizes[rank], dtype)
            for part, array in enumerate(inputs):
                array.flags.writeable = case.in_place and part == rank
            comm.reduce_scatter(call, output, inputs, op)
            for part, array in enumerate(inputs):
                assert array is output or same(array, case.values(rank, part)), "input changed"
            return output
        case Kind.ALL_TO_ALL:
            inputs = [_crossing(case, rank, dst) for dst in range(n)]
            outputs = [np.empty(_crossing(case, src, rank).size, dtype) for src in range(n)]
            comm.all_to_all(call, outputs, inputs)
            return outputs
        case _:
            raise AssertionError(kind)


def check(result: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return all(check(got, want) for got, want in zip(result, expected, strict=True))
    if expected is None:
        return result is None
    return result.dtype == expected.dtype and same(result, expected)


@pytest.mark.parametrize("n", GROUP_SIZES)
def test_every_collective_gives_what_the_oracle_gives(transport: Transport, n: int) -> None:
    # Not all of them where values were seen over another transport, and this is about who waits for
    # whom or other ways to read and write; or where every work item is a step in Python.
    repeats = transport.name == "inproc-unbuffered" or transport.tls or transport.on_device
    cases = table(n, whole=not repeats)
    if transport.on_device and n > 3:
        cases = cases[:: n // 2]

    def body(member: Member) -> int:
        for case, wanted in cases:
            result = perform(member, case)
            assert check(result, wanted[member.rank]), (
                f"{case}: rank {member.rank} got {result}, expected {wanted[member.rank]}"
            )
        return len(cases)

    assert run_group(transport, n, body, TINY) == [len(cases)] * n


def random_floats(rank: int, size: int, dtype: Any) -> Flat:
    """Values over several magnitudes: their sum depends on the order of addition."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 4, size)).astype(dtype)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_results_are_the_same_bits_on_every_rank_and_in_a_second_run(
    transport: Transport, n: int
) -> None:
    dtypes = [np.float16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16]
    if transport.on_device or n > 3:
        dtypes = dtypes[n % 2 :: 2]  # what the order depends on is the same for all

    def body(member: Member) -> list[bytes]:
        results: list[bytes] = []
        for dtype in dtypes:
            for size in (3, 41, 1001):
                for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
                    buffer = random_floats(member.rank, size, dtype)
                    member.all_reduce(buffer, op)
                    results.append(buffer.tobytes())
        return results

    first = run_group(transport, n, body, TINY)
    assert all(result == first[0] for result in first)
    assert run_group(transport, n, body, TINY) == first


@pytest.mark.parametrize("n", [2, 5])
def test_float_sums_are_as_accurate_as_their_reduction_dtype(transport: Transport, n: int) -> None:
    """Floats of 16 bits are summed in float32 and rounded once: within half a unit of the truth."""

    def body(member: Member) -> None:
        for dtype, unit in ((np.float16, 2**-11), (ml_dtypes.bfloat16, 2**-8)):
            for size in (7, 1001):
                inputs = [random_floats(r, size, dtype) for r in range(n)]
                truth = sum(x.astype(np.float64) for x in inputs)
                slack = sum(abs(x.astype(np.float64)) for x in inputs) * n * 2.0**-24
                buffer = inputs[member.rank].copy()
                member.all_reduce(buffer, ReduceOp.SUM)
                error = abs(buffer.astype(np.float64) - truth)
                assert (error <= abs(truth) * unit + slack + 2.0**-25).all()

    run_group(transport, n, body, TINY)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_nan_and_infinity_pass_as_in_numpy(transport: Transport, n: int) -> None:
    """And no floating-point warning or ``seterr`` of one rank disturbs the others."""
    special = np.array([np.nan, np.inf, -np.inf, 1.0, 3e38, -0.0] * 20, np.float32)

    def body(member: Member) -> None:
        inputs = [np.roll(special, rank) for rank in range(n)]
        with np.errstate(all="raise" if member.rank == 0 else "warn"):
            for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
                buffer = inputs[member.rank].copy()
                member.all_reduce(buffer, op)
                with np.errstate(all="ignore"):
                    wanted = reduced(inputs, op.kind.name)
                    assert same(np.isnan(buffer), np.isnan(wanted)), op
                    finite = ~np.isnan(wanted)
                    assert np.allclose(buffer[finite], wanted[finite]), op

    run_group(transport, n, body, TINY)


def test_premul_sum_takes_an_array_of_factors(transport: Transport) -> None:
    n, size = 3, 203

    def body(member: Member) -> None:
        for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
            factors = [np.arange(size, dtype=np.float32) % 4 * 2.0**-r for r in range(n)]
            inputs = [(np.arange(size) % 5 + r).astype(dtype) for r in range(n)]
            wanted = sum(
                f * x.astype(np.float32) for f, x in zip(factors, inputs, strict=True)
            ).astype(dtype)
            op = premul_sum(factors[member.rank])
            buffer = inputs[member.rank].copy()
            member.all_reduce(buffer, op)
            assert same(buffer, wanted)
            buffer = inputs[member.rank].copy()
            call = member.call(Kind.REDUCE, dtype, size, op, root=1)
            member.comm.reduce(call, buffer, op, 1)
            assert same(buffer, wanted if member.rank == 1 else inputs[member.rank])

    run_group(transport, n, body, TINY)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_default_thresholds_on_large_arrays(transport: Transport, n: int) -> None:
    """The real table, with arrays of several segments: 5 MiB and some."""
    size = 1_310_727

    def body(member: Member) -> None:
        rank = member.rank
        buffer = np.arange(size, dtype=np.float32) % 97 + rank
        member.all_reduce(buffer, ReduceOp.SUM)
        wanted = (np.arange(size, dtype=np.float32) % 97) * n + sum(range(n))
        assert np.array_equal(buffer, wanted)
        buffer = wanted.copy() if rank == 1 else np.zeros(size, np.float32)
        call = member.call(Kind.BROADCAST, buffer.dtype, size, root=1)
        member.comm.broadcast(call, buffer, 1)
        assert np.array_equal(buffer, wanted)
        buffer = np.full(size, rank + 1, np.float32)
        call = member.call(Kind.REDUCE, buffer.dtype, size, ReduceOp.SUM, root=0)
        member.comm.reduce(call, buffer, ReduceOp.SUM, 0)
        assert (buffer == (n * (n + 1) // 2 if rank == 0 else rank + 1)).all()
        inputs = [np.full(size // n + i, rank + i, np.float32) for i in range(n)]
        output = np.empty_like(inputs[rank])
        call = member.call(Kind.REDUCE_SCATTER, output.dtype, op=ReduceOp.SUM)
        member.comm.reduce_scatter(call, output, inputs, ReduceOp.SUM)
        assert (output == sum(range(n)) + n * rank).all()
        outputs = [np.empty(size // n + i, np.float32) for i in range(n)]
        member.comm.all_to_all(
            member.call(Kind.ALL_TO_ALL, output.dtype),
            outputs,
            [np.full(size // n + rank, 10 * rank + j, np.float32) for j in range(n)],
        )
        assert all((outputs[i] == 10 * i + rank).all() for i in range(n))

    run_group(transport, n, body)


@pytest.mark.parametrize("n", GROUP_SIZES)
def test_no_member_leaves_a_barrier_before_the_last_has_entered(
    transport: Transport, n: int
) -> None:
    arrived = [0] * n

    def body(member: Member) -> None:
        for turn in range(1, 30):
            arrived[member.rank] = turn
            member.barrier()
            assert min(arrived) >= turn

    run_group(transport, n, body, TINY)
