"""Ranks that train sharded inside jax.jit agree with one that trains alone."""

import jax
import numpy as np

import meshlib as dist
from tests.support.parallel.jit_training import alone, assert_close, train_sharded

jax.config.update("jax_enable_x64", True)
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
