"""Four processes, over shared memory, train as one does: FSDP, HSDP and tensor parallel beside."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
import meshlib as dist
from tests.support.parallel.fsdp_training import MODELS, assert_equal, shard, train, whole

mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
flat = mesh.flatten("dp_shard")
for name, (make, batches) in MODELS.items():
    expected = make()
    train(expected, batches)
    for over in (flat, mesh["a", "b"]):
        for reshard in (None, True):
            model = shard(make(), over, reshard_after_forward=reshard)
            train(model, batches, dist.get_rank(), 4)
            assert_equal(whole(model.state_dict()), expected.state_dict())
expected = expected.state_dict()
model = shard(make(tp=mesh["b"]), mesh["a"])
train(model, batches, mesh.get_local_rank("a"), 2)
assert_equal(whole(model.state_dict()), expected)

# Large enough to be gathered and reduced where it is, in symmetric memory.
large = lambda: make(blocks=1, width=256, dtype="f8")
model, alone = shard(large(), flat), large()
train(model, batches, dist.get_rank(), 4, steps=2)
train(alone, batches, steps=2)
assert_equal(whole(model.state_dict()), alone.state_dict(), 1e-9)  # rounded in another order
print(f"rank {dist.get_rank()} agrees")
dist.destroy_process_group()
"""


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


OF_JAX = """
import jax
jax.config.update("jax_enable_x64", True)
import numpy as np
import meshlib as dist
from tests.support.parallel.jit_training import alone, assert_close, train_sharded

mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
whole = train_sharded("transformer", mesh)
if dist.get_rank() == 0:
    expected = jax.tree_util.tree_leaves(alone("transformer")[0])
else:
    expected = jax.tree_util.tree_leaves(whole)
expected = [dist.broadcast(np.array(x), src=0) for x in expected]
assert_close(jax.tree_util.tree_leaves(whole), expected)
print(f"rank {dist.get_rank()} agrees")
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_four_processes_of_jax(tmp_path):
    pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")
    script = tmp_path / "train.py"
    script.write_text(OF_JAX)
    run(tmp_path, script, {}, seconds=110)
