"""Four processes, over shared memory, as a cp=2, tp=2 mesh learn what one process learns."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import meshlib as dist
from tests.support.parallel.small_gpt import GPT, assert_close, sequence_parallel_plan, train
from parallel import DistributedDataParallel, VocabParallelCrossEntropyLoss, parallelize
from parallel.context import context_parallel, split_sequence
from parallel.state import global_state

mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
alone = GPT()
expected = train(alone, steps=5)
for method in ("ring", "all_to_all"):
    model = parallelize(GPT(), mesh["tp"], sequence_parallel_plan())
    context_parallel(model, mesh["cp"], method=method)
    losses = train(
        DistributedDataParallel(model, mesh["cp"]),
        VocabParallelCrossEntropyLoss(mesh["tp"]),
        lambda x: split_sequence(x, mesh["cp"], zigzag=method == "ring"),
        steps=5,
    )
    losses = mesh["cp"].all_reduce(np.array(losses), op=dist.ReduceOp.AVG)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
    state = global_state(model)["model"]
    whole = {path: getattr(x, "full_array", lambda x=x: x)() for path, x in state.items()}
    assert_close(whole, alone.state_dict())
print(f"rank {dist.get_rank()} agrees")
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_four_processes(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "4", str(script)]
    env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TMPDIR=str(tmp_path))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agrees") == 4
