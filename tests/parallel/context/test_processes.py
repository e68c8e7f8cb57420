"""Four processes, over shared memory, as a cp=2, tp=2 mesh learn what one process learns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

PROGRAM = (PROGRAMS / "train.py").read_text()


@pytest.mark.processes
def test_four_processes(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "4", str(script)]
    env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TMPDIR=str(tmp_path))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 4
