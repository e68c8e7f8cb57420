import jax
import numpy as np

import meshlib as dist
from meshlib.sharding import DArray, P, Sharding, distribute_array

dist.init_process_group()
mesh = dist.DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("dp", "tp"))
whole = np.arange(24, dtype=np.float32).reshape(4, 6)
mesh.to_jax()  # before anything else makes JAX look for devices
x = distribute_array(whole, Sharding(mesh, P(None, ("tp", "dp"))))
there = x.to_jax()
assert there.shape == (4, 6)
assert there.sharding.spec == jax.sharding.PartitionSpec(None, ("tp", "dp"))
back = DArray.from_jax(jax.jit(lambda y: 2 * y)(there), mesh)
assert back.sharding == x.sharding, back
assert np.array_equal(back.full_array(), 2 * whole)
partial = Sharding(mesh, P(), "dp")
total = float(distribute_array(whole, partial).to_jax().sum())
try:
    distribute_array(whole[:3], Sharding(mesh, P("dp"))).to_jax()
except ValueError as error:
    assert "not split evenly" in str(error), error
else:
    raise AssertionError("uneven parts became a jax.Array")
print("sum", total, flush=True)
dist.destroy_process_group()
