"""Calls that a signal handler makes: they run or raise at once, wherever the signal comes."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls import call_queue, call_stream, call_streams, state
from meshlib._calls.failures import failure, reporter
from meshlib.testing import run_ranks
from tests.support.transport.interrupts import SOON, Interrupter, in_thread
from transport._waiting import interrupts

CALLS = {module.__file__ for module in (interrupts, call_queue, call_stream, call_streams, state)}
FAILING = CALLS | {module.__file__ for module in (failure, reporter)}


def call_in_a_handler(group: dist.ProcessGroup, async_op: bool, outcomes: list[str]) -> None:
    x = np.ones(3)
    try:
        work = group.all_reduce(x, async_op=async_op)
        if async_op:
            work.wait()
        outcomes.append("ran")
    except dist.DistBackendError as error:
        outcomes.append(str(error))


@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_in_the_middle_of_another_runs_or_is_refused(async_op: bool) -> None:
    """Interrupt an all_reduce at each of its steps, the first of its group included."""

    def program() -> list[str]:
        outcomes = list[str]()
        for moment in range(1, 10_000):
            group = dist.new_group([0])
            handler = Interrupter(
                moment,
                CALLS,
                as_signals=True,
                handler=lambda group=group: call_in_a_handler(group, async_op, outcomes),
            )
            x = np.ones(3)
            with handler:
                group.all_reduce(x)
            assert x.tolist() == [1.0] * 3
            group.all_reduce(x)
            dist.destroy_process_group(group)
            if handler.left > 0:
                return outcomes
        raise AssertionError("no end")

    outcomes = in_thread(lambda: run_ranks(program, 1)[0]).result(4 * SOON)
    assert "ran" in outcomes
    refused = "is in the middle of" if async_op else "in the middle of call #1 all_reduce"
    assert any(refused in text for text in outcomes)
    assert all(text == "ran" or "signal handler" in text for text in outcomes)


@pytest.mark.parametrize("step", range(0, 120, 7))
def test_a_call_while_a_failure_is_explained_raises_at_once(step: int) -> None:
    """Interrupt a call that fails, from its error on to what it raises."""

    def program() -> list[str]:
        outcomes, group = list[str](), dist.group.WORLD
        group.barrier()
        x = np.ones(2 + dist.get_rank())
        handler = Interrupter(
            1 + step,
            {failure.__file__, reporter.__file__, state.__file__},
            as_signals=True,
            handler=lambda: call_in_a_handler(group, False, outcomes),
        )
        with pytest.raises(dist.CollectiveMismatchError), handler:
            group.all_reduce(x)
        return outcomes

    for outcomes in in_thread(lambda: run_ranks(program, 2)).result(SOON):
        assert outcomes != ["ran"]
