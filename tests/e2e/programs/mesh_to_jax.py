import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshlib as dist

dist.init_process_group()
mesh = dist.DeviceMesh("cpu", [[1], [0]], mesh_dim_names=("dp", "tp"))
jmesh = mesh.to_jax()
assert jmesh.shape == {"dp": 2, "tp": 1}, jmesh
order = [device.process_index for device in jmesh.devices.ravel()]
assert order == [1, 0], order
assert mesh.to_jax() == jmesh


def local(x):
    return jax.lax.psum(x, "dp")


total = jax.jit(jax.shard_map(local, mesh=jmesh, in_specs=P("dp"), out_specs=P()))
sharding = NamedSharding(jmesh, P("dp"))
x = jax.make_array_from_callback((2,), sharding, lambda i: np.array([3.0, 4.0])[i])
print("sum", float(total(x)[0]), "and", int(dist.all_reduce(np.array(1))), flush=True)
dist.destroy_process_group()
