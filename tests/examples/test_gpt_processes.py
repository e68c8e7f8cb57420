"""The GPT example as a program: ranks are processes, which meshrun starts."""

import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from gpt_runs import EVERYTHING, EXAMPLE, name_of, run, write_config

from meshlib.checkpoint import latest_step

MESHRUN = Path(sys.executable).with_name("meshrun")
DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
PAIRS = [dict.fromkeys(pair, 2) for pair in combinations(DIMS, 2)]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def meshrun(directory, config, dims, *arguments):
    """Run the example over ``dims``; return what rank 0 printed, and the losses."""
    command = [MESHRUN, "--mesh", name_of(dims), EXAMPLE, "--config", config, *arguments]
    done = subprocess.run(
        list(map(str, command)),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout, np.loadtxt(directory / "out" / "gpt-losses.txt")


def test_a_run_with_checkpoints_and_pictures(tmp_path):
    config = write_config(tmp_path, steps=4, every=2, microbatches=2)
    printed, losses = meshrun(tmp_path, config, {"pp": 2}, "--checkpoints", tmp_path / "run")
    assert "4 steps: loss" in printed
    assert latest_step(tmp_path / "run") == 4
    for name in ("gpt.png", "gpt-pipeline.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG\r\n")
    expected = run(config, {"dp_shard": 1})[0]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)


@pytest.mark.skipif(not EVERYTHING, reason="15 jobs of 4 processes: make test-meshes")
@pytest.mark.parametrize("dims", PAIRS, ids=name_of)
def test_pairs(dims, tmp_path):
    config = write_config(tmp_path, microbatches=2, experts=2)
    _, losses = meshrun(tmp_path, config, dims)
    np.testing.assert_allclose(losses, run(config, {"dp_shard": 1})[0], rtol=0, atol=1e-9)
