"""Random programs: a list of calls on overlapping groups, the same on every rank.

Some calls are waited for at once, others after later ones or at the end; the oracle judges them
all alike. Hypothesis shrinks a program that fails to the few calls that matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


@dataclass(frozen=True)
class Step:
    """One call of a program. ``wait``: "sync", "async" (waited for at the end), or "all now"."""

    group: int
    spec: Spec
    wait: str


@dataclass(frozen=True)
class Program:
    """Groups are tuples of ranks, in the order in which they are made; 0 is the default group."""

    size: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


@st.composite
def specs(draw):
    kind = draw(st.sampled_from((*REDUCTIONS, *MOVES)))
    op = draw(st.sampled_from(OPS)) if kind in REDUCTIONS else "SUM"
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if applies(op, dtype)]))
    dims = st.sampled_from([0, 1, 2, 3, 5, 700])
    shape = draw(st.lists(dims, min_size=kind == "all_to_all_uneven", max_size=2).map(tuple))
    layout = draw(st.sampled_from(["C", "strided", "transposed"]))
    return Spec(kind, dtype, shape, op, draw(st.integers(0, 4)), layout, draw(st.integers(0, 99)))


@st.composite
def programs(draw):
    size = draw(st.integers(1, 5))
    subset = st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(sorted).map(tuple)
    groups = (tuple(range(size)), *draw(st.lists(subset, max_size=4)))
    step = st.builds(
        Step,
        st.integers(0, len(groups) - 1),
        specs(),
        st.sampled_from(["sync", "async", "all now"]),
    )
    return Program(size, groups, tuple(draw(st.lists(step, min_size=1, max_size=15))))


def execute(program: Program):
    """Run the program as one rank; return the result of each step, None if it has no part."""
    rank = dist.get_rank()
    groups = [dist.group.WORLD, *(dist.new_group(ranks) for ranks in program.groups[1:])]
    results = [None] * len(program.steps)
    pending = {}

    def settle():
        for i, work in pending.items():
            results[i] = work.result()
        pending.clear()

    for i, step in enumerate(program.steps):
        if rank not in program.groups[step.group]:
            continue
        got = perform(step.spec, groups[step.group], async_op=step.wait == "async")
        if isinstance(got, dist.Work):
            pending[i] = got
        else:
            results[i] = got
        if step.wait == "all now":
            settle()
    settle()
    return results


def judge(program: Program, results) -> None:
    for i, step in enumerate(program.steps):
        members = program.groups[step.group]
        for place, wanted in enumerate(expect(step.spec, len(members))):
            got = results[members[place]][i]
            assert same(got, wanted), f"step {i}, rank {members[place]}: {got!r}, not {wanted!r}"


@given(programs())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_random_programs_over_inproc(program):
    judge(program, run_ranks(execute, program.size, program, timeout=120))


@given(programs())
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_random_programs_over_tcp(program):
    judge(program, run_ranks(execute, program.size, program, backend="tcp", timeout=120))


@given(programs())
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_random_programs_over_shared_memory(program):
    judge(program, run_ranks(execute, program.size, program, backend="shm", timeout=120))


def test_the_judge_notices_a_wrong_value_a_wrong_dtype_and_a_wrong_shape():
    spec = Spec("all_reduce", np.dtype("f4"), (2,))
    program = Program(2, ((0, 1),), (Step(0, spec, "sync"),))
    (right,) = run_ranks(execute, 2, program)[0]
    judge(program, [[right], [right]])
    for wrong in (right + 1, right.astype("f8"), right.reshape(1, 2)):
        with pytest.raises(AssertionError, match="step 0, rank 1"):
            judge(program, [[right], [wrong]])
