"""Passes over processes of which one dies: of modules, which need no JAX, and in ``jax.grad``."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

PROGRAM = (PROGRAMS / "gradients_of_modules.py").read_text()


def test_a_death_in_a_backward_pass_is_named_and_contexts_of_the_dead_end(meshrun):
    script = meshrun.script(PROGRAM)
    result = meshrun.run("-n", "4", "--on-failure", "continue", script)
    assert result.code == 0, result.err
    lines = sorted(result.out.splitlines())
    assert lines[:2] == ["done 0 False", "done 1 False"]
    assert lines[2].startswith("worker2 2 worker 'worker2' (rank 2) was killed by SIGKILL, ")


IN_GRAD = (PROGRAMS / "gradients_in_grad.py").read_text()


def test_a_death_in_a_call_of_a_function_that_jax_differentiates_is_named(meshrun):
    script = meshrun.script(IN_GRAD)
    result = meshrun.run("-n", "3", "--on-failure", "continue", script)
    assert result.code == 0, result.err
    first, second, lost, last = result.out.splitlines()
    assert (first, second, last) == ("right True", "right True", "goes on 0.0")
    assert lost.startswith("worker2 2 worker 'worker2' (rank 2) was killed by SIGKILL, ")
    assert "after __main__.mortal was called there" in lost
