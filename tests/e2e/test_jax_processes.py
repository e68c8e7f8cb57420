"""JAX in real processes: its own mesh of them, and what a rank that dies does to a jitted step."""

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
DEADLINE = 90


def test_mesh_to_jax(meshrun):
    script = meshrun.script((PROGRAMS / "mesh_to_jax.py").read_text())
    done = meshrun.run("--nproc-per-node", "2", script, deadline=DEADLINE)
    assert done.code == 0, done.err
    assert done.out.count("sum 7.0 and 2") == 2


def test_a_process_that_dies_in_a_jitted_step_is_named(meshrun):
    script = meshrun.script((PROGRAMS / "dies_in_a_jitted_step.py").read_text())
    done = meshrun.run("--nproc-per-node", "2", script, deadline=DEADLINE)
    assert done.code != 0
    assert "raised: True" in done.out, done.err


def test_sharded_arrays_to_jax_and_back(meshrun):
    script = meshrun.script((PROGRAMS / "sharded_arrays_to_jax_and_back.py").read_text())
    done = meshrun.run("--nproc-per-node", "2", script, deadline=DEADLINE)
    assert done.code == 0, done.err
    assert done.out.count("sum 276.0") == 2
