"""Four processes, over shared memory, train as one does: FSDP, HSDP and tensor parallel beside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

PROGRAM = (PROGRAMS / "train.py").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("native", ["1", "0"])
def test_four_processes(tmp_path, native):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    run(tmp_path, script, {"MESHLIB_NATIVE": "0"} if native == "0" else {})


def run(tmp_path, script, settings, seconds=55):
    command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "4", str(script)]
    env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TMPDIR=str(tmp_path))
    env |= settings
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 4


OF_JAX = (PROGRAMS / "train_in_jit.py").read_text()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_four_processes_of_jax(tmp_path):
    pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")
    script = tmp_path / "train.py"
    script.write_text(OF_JAX)
    run(tmp_path, script, {}, seconds=110)
