"""A shard moved from one array dim to another, against the all_to_all alone, in one run.

    meshrun --nproc-per-node 2 tests/benchmarks/redistribute.py [MiB] [rounds]

Both give a new array in each round. The all_to_all alone has its parts packed already, and what it
gives is not yet in the order of the array: it is what no way to move the shard can do without.
"""

import statistics
import sys
from time import perf_counter

import numpy as np

import meshlib as dist

MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 64
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 60


def main():
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",))
    rows = 2048
    shape = (rows, (MIB << 20) // 8 // rows)
    x = dist.distribute_array(
        np.arange(rows * shape[1], dtype=np.float64).reshape(shape),
        dist.Sharding(mesh, dist.P("dp", None)),
        src_data_rank=None,
    )
    flat = x.to_local().reshape(-1).copy()
    back = x.redistribute(dist.P(None, "dp"))

    def alone():
        return mesh.all_to_all_single(np.empty_like(flat), flat)

    ways = {
        "all_to_all alone": alone,
        "copy of a part": flat.copy,
        "('dp', None) to (None, 'dp')": lambda: x.redistribute(dist.P(None, "dp")),
        "(None, 'dp') to ('dp', None)": lambda: back.redistribute(dist.P("dp", None)),
    }
    times = {name: [] for name in ways}
    for i in range(ROUNDS + 5):
        # Each is the first of a round as often as the others.
        names = list(ways)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            mesh.barrier()
            start = perf_counter()
            kept = ways[name]()
            took = np.array([perf_counter() - start])
            del kept
            mesh.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 5:
                times[name].append(took[0])
    if mesh.get_local_rank() == 0:
        medians = {name: statistics.median(own) for name, own in times.items()}
        for name, median in medians.items():
            ratio = median / medians["all_to_all alone"]
            print(f"{name:30} {1e3 * median:8.2f} ms  {ratio:5.2f}")


main()
