"""A pipeline trains as torch's 1F1B on Gloo does: the same weights, 20 steps, float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytest.importorskip("torch")

PROGRAM = (PROGRAMS / "pipeline_beside_torch.py").read_text()


def test_1f1b_trains_as_torchs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "meshlib._launcher", "--start", "exec"]
    command += ["--nproc-per-node", "2", str(script)]
    env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 2
