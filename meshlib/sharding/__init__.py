"""Global arrays on a mesh: shardings, redistribution plans and distributed arrays.

A ``Sharding`` is a value that computes without communication::

    s = Sharding(mesh, P("dp", None, ("cp", "tp")))     # Or [Shard(0), Replicate(), Partial("sum")]

    s.local_shape(shape, rank)      # The shape of a rank's part; by default this rank's.
    s.slices(shape, rank)           # The rank's part of the global array, a slice for each dim.

    s.replica(rank), s.replica_count   # The rank's number among the ranks with the same values.

    s.parts(shape)                  # Each part once, as slices, for writing them.

    s.spec, s.partial, s.placements, s.mesh, s.dims, s.reduced(), s.with_spec(...)

    s.plan(other, shape, dtype)     # The collectives from one sharding to another, with bytes.

A ``DArray`` is a global array; each rank has a part of it::

    x = distribute_array(array, s)  # Or zeros, ones, full, random(shape, s, ...).
    x = DArray.from_local(part, s)

    x.to_local(), x.redistribute(P(None, "dp")), x.full_array()

    np.sum(x * 2, axis=0), a @ b    # NumPy's functions: each rank computes its part.
"""

from meshlib.sharding._blocks import block
from meshlib.sharding._creation import distribute_array, full, ones, random, zeros
from meshlib.sharding._darray import DArray
from meshlib.sharding._global_array import ShardingError
from meshlib.sharding._redistribution.steps import Plan, PlanStep
from meshlib.sharding._sharding import Sharding
from meshlib.sharding._spec import P, Partial, Replicate, Shard

__all__ = [
    "DArray",
    "P",
    "Partial",
    "Plan",
    "PlanStep",
    "Replicate",
    "Shard",
    "Sharding",
    "ShardingError",
    "block",
    "distribute_array",
    "full",
    "ones",
    "random",
    "zeros",
]
