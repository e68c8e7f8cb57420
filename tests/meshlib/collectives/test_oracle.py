"""Every collective x op x dtype x shape x group size, waited for or not, against the oracle."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from tests.support.meshlib.array_oracle import (
    DTYPES,
    MOVES,
    OPS,
    REDUCTIONS,
    Spec,
    applies,
    expect,
    perform,
    same,
)

SHAPES = [(), (1,), (0,), (7,), (2, 3), (3, 0, 2), (4, 5)]
LAYOUTS = ["C", "strided", "transposed"]
FEW_DTYPES = [np.dtype("f4"), np.dtype("i4"), np.dtype("c16"), DTYPES[-9]]


def all_cases() -> list[Spec]:
    """Each kind with each dtype and op; shapes, roots and layouts take turns."""
    shapes, layouts, numbers = cycle(SHAPES), cycle(LAYOUTS), iter(range(1 << 30))

    def case(kind, dtype, op="SUM"):
        seed = next(numbers)
        shape = next(shapes)
        if kind == "all_to_all_uneven":
            shape = shape or (1,)
        return Spec(kind, dtype, shape, op, root=seed, layout=next(layouts), seed=seed)

    cases = []
    for dtype in DTYPES:
        for op in OPS:
            if applies(op, dtype):
                cases += [case(kind, dtype, op) for kind in REDUCTIONS]
        cases += [case(kind, dtype) for kind in MOVES]
    for dtype in FEW_DTYPES:
        for kind in (*REDUCTIONS, *MOVES):
            cases += [case(kind, dtype) for _ in range(len(SHAPES))]
    return cases


def main_cases() -> list[Spec]:
    """Each kind with some dtypes."""
    return [spec for spec in all_cases() if spec.dtype in FEW_DTYPES]


def few_cases() -> list[Spec]:
    """Each kind with some dtypes and shapes, and large arrays, which take other algorithms."""
    return main_cases()[::3] + large_cases()


def large_cases() -> list[Spec]:
    kinds = (*REDUCTIONS, *MOVES)
    return [Spec(k, np.dtype("f4"), (60_001,), root=i, seed=i) for i, k in enumerate(kinds)]


def check(size: int, cases: list[Spec], async_op: bool, backend: str) -> None:
    wanted = [expect(spec, size) for spec in cases]

    def program():
        group, rank = dist.group.WORLD, dist.get_rank()
        if async_op:
            # All are issued before any is waited for.
            handles = [perform(spec, group, async_op=True) for spec in cases]
            results = [h.result() if isinstance(h, dist.Work) else h for h in handles]
        else:
            results = [perform(spec, group, async_op=False) for spec in cases]
        for spec, result, expected in zip(cases, results, wanted, strict=True):
            assert same(result, expected[rank]), f"{spec}: {result!r} is not {expected[rank]!r}"
        return len(results)

    assert run_ranks(program, size, backend=backend, timeout=120) == [len(cases)] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_inproc_gives_what_the_oracle_gives(size):
    # Arithmetic does not depend on how many members there are.
    check(size, all_cases() if size in {2, 3, 5} else main_cases(), False, "inproc")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_async_calls_give_what_the_oracle_gives(size):
    check(size, all_cases(), True, "inproc")


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_other_transports_give_what_the_oracle_gives(backend, size, async_op):
    check(size, few_cases(), async_op, backend)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_large_arrays(size):
    check(size, large_cases(), False, "inproc")


@pytest.mark.parametrize("backend", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_same_bits_on_every_rank_and_in_a_second_run(size, backend):
    """Sums over several magnitudes depend on the order of addition, which is fixed."""

    def program():
        bits = []
        for dtype in ("f2", "f4", "f8", "c8", DTYPES[-9]):
            for count in (1, 5, 1000, 40_000):
                rng = np.random.default_rng(dist.get_rank())
                x = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
                with np.errstate(all="ignore"):
                    x = x.astype(dtype)
                dist.all_reduce(x)
                bits.append(x.tobytes())
        return bits

    first = run_ranks(program, size, backend=backend)
    assert all(bits == first[0] for bits in first)
    assert run_ranks(program, size, backend=backend) == first
