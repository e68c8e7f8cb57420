"""The GPT example as a program: ranks are processes, which meshrun starts."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from meshlib.checkpoint import latest_step
from tests.examples.gpt_runs import EVERYTHING, EXAMPLE, name_of, run, write_config

MESHRUN = Path(sys.executable).with_name("meshrun")
DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
PAIRS = [dict.fromkeys(pair, 2) for pair in combinations(DIMS, 2)]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(500),
    pytest.mark.usefixtures("double_precision"),
]


def meshrun(directory, config, dims, *arguments):
    """Run the example over ``dims``; return what rank 0 printed, and the losses."""
    out = directory / "losses.txt"
    command = [MESHRUN, "--mesh", name_of(dims), EXAMPLE, "--config", config, "--losses", out]
    done = subprocess.run(
        list(map(str, [*command, *arguments])),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, np.loadtxt(out)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    config = write_config(tmp_path, steps=4, every=2, microbatches=2)
    folder = tmp_path / "run"
    printed, losses = meshrun(
        tmp_path, config, {"pp": 2}, "--checkpoints", folder, "--stop-after", 3
    )
    assert "3 steps on pp=2: loss" in printed
    assert latest_step(folder) == 2
    _, again = meshrun(tmp_path, config, {"pp": 2}, "--checkpoints", folder)
    np.testing.assert_array_equal(again[:3], losses)
    expected = run(config, {"dp_shard": 1}, 4)[0]
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-9)


@pytest.mark.skipif(not EVERYTHING, reason="15 jobs of 4 processes: make test-meshes")
@pytest.mark.parametrize("dims", PAIRS, ids=name_of)
def test_pairs(dims, tmp_path):
    config = write_config(tmp_path, microbatches=2, experts=2)
    _, losses = meshrun(tmp_path, config, dims)
    np.testing.assert_allclose(losses, run(config, {"dp_shard": 1}, 20)[0], rtol=0, atol=1e-9)


@pytest.mark.skipif(not EVERYTHING, reason="5 jobs of 4 processes: make test-meshes")
@pytest.mark.parametrize("dims", [pair for pair in PAIRS if "pp" in pair], ids=name_of)
def test_pairs_with_another_schedule(dims, tmp_path):
    settings = {"pipeline": '"ZBVZeroBubble"', "stages_per_rank": 2, "layers": 4, "experts": 2}
    config = write_config(tmp_path, microbatches=2, **settings)
    _, losses = meshrun(tmp_path, config, dims)
    np.testing.assert_allclose(losses, run(config, {"dp_shard": 1}, 20)[0], rtol=0, atol=1e-9)
