"""A tour of meshes: slicing, groups and collectives, each line with its result.

meshrun --nproc-per-node 4 examples/mesh_tour.py
"""

from __future__ import annotations

import numpy as np

import meshlib as dist


def show(line: str) -> None:
    """Print ``line`` once if it is the same on all ranks, else each rank's."""
    lines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() > 0:
        return
    if len(set(lines)) == 1:
        print(line)
        return
    expression = line.partition(" = ")[0]
    print(expression)
    for rank, other in enumerate(lines):
        print(f"    rank {rank}: {other.removeprefix(f'{expression} = ')}")


def title(text: str) -> None:
    """Print a heading, on one rank."""
    if dist.get_rank() == 0:
        print(f"\n# {text}")


def main() -> None:
    """Walk around a 2 × 2 mesh."""
    # 4 ranks in a row become 2 × 2; -1 would infer a size.
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()

    title("The mesh and this rank's place in it")
    show(f"{mesh.shape = }")
    show(f"{mesh.mesh.tolist() = }")
    show(f"{mesh.get_coordinate() = }")
    show(f"{mesh.get_local_rank('dp') = }")

    title("Slices: each rank gets the one that it is in")
    show(f"{mesh['dp'].mesh.tolist() = }")
    show(f"{mesh['tp'].mesh.tolist() = }")
    show(f"{mesh['tp', 'dp'].mesh.tolist() = }")

    title("Groups")
    show(f"{mesh['tp'].get_group().rank() = }")
    show(f"{dist.get_process_group_ranks(mesh.get_group('tp')) = }")

    title("Flattened: several dims as one")
    mesh.flatten("all")
    show(f"{mesh['all'].size() = }")

    title("A mesh is a group of ranks: collectives are its methods")
    show(f"{mesh['tp'].all_reduce(np.array([rank])) = }")
    show(f"{mesh['dp'].all_reduce(np.array([rank]), op=dist.ReduceOp.MAX) = }")
    show(f"{mesh.all_reduce(np.array([1.0]), op=dist.ReduceOp.SUM) = }")
    show(f"{mesh['dp'].broadcast(np.array([10 * rank]), group_src=1) = }")
    gathered = np.empty(2, dtype=int)
    show(f"{mesh['tp'].all_gather_into_tensor(gathered, np.array([rank])) = }")
    own = np.empty(1, dtype=int)
    rows = np.array([rank, 10 * rank])
    show(f"{mesh['tp'].reduce_scatter_tensor(own, rows) = }")

    title("Asynchronously: compute while the bytes travel")
    work = mesh.all_reduce(np.array([rank + 1]), async_op=True)
    show(f"{work.result() = }")

    title("The same calls as c10d's functions")
    show(f"{dist.all_reduce(np.array([rank]), group=mesh['dp']) = }")
    show(f"{dist.get_world_size(mesh['tp']) = }")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
