"""Cases of groups of some ranks. They come last: ``groups_of_some`` leaves the ranks with different
numbers of groups made, by which PyTorch names the next ones.
"""

from __future__ import annotations

import torch.distributed as dist
from registry import backend, case, seeded
from torch.distributed.device_mesh import init_device_mesh


@case
def names_of_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        group = mesh.get_group(name)
        assert group.group_desc == f"mesh_{name}", group.group_desc
        assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
        if backend() == "meshlib":
            assert f"'mesh_{name}'" in str(group.mesh_group), str(group.mesh_group)
            assert list(group.mesh_group.ranks) == dist.get_process_group_ranks(group)
    return []


@case
def groups_of_some():
    rank = dist.get_rank()
    low, mine = None, [0, 1] if rank < 2 else [2, 3]
    # PyTorch 2.15 names a group by how many this rank has made before. If that is not the same on
    # all ranks, meshlib's members find each other, Gloo's do not.
    if rank < 2 or backend() == "gloo":
        low = dist.new_group(mine, use_local_synchronization=True)
    odd = dist.new_group([1, 3])
    results = []
    for group in (low if rank < 2 else None, odd if rank % 2 else None):
        if group is not None:
            x = seeded(3)
            dist.all_reduce(x, group=group)
            dist.barrier(group)
            results.append(x)
    dist.destroy_process_group(odd) if rank % 2 else None
    return results
