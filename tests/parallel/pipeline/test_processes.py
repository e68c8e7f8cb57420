"""Two processes, over shared memory and over TCP, train as one does."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import meshlib as dist
from tests.support.parallel.pipeline_training import assert_equal, make_mesh
from tests.support.parallel.pipeline_training import train_pipeline, train_whole
from parallel.pipeline import Schedule1F1B, ScheduleZBVZeroBubble

dist.init_process_group({backend!r})
whole = train_whole()
for kind, placed in [(Schedule1F1B, [[0], [1]]), (ScheduleZBVZeroBubble, [[0, 3], [1, 2]])]:
    mesh = make_mesh(2)
    results = [None, None]
    dist.all_gather_object(results, train_pipeline(mesh, kind, placed, 8))
    assert_equal(results, whole)
print(f"rank {{dist.get_rank()}} agrees")
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_two_processes(tmp_path, backend):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(backend=backend))
    command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "2", str(script)]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env = dict(os.environ, TMPDIR=str(tmp_path), **threads)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 2
