"""A tour of meshes: slicing, groups and collectives, each line with its result.

meshrun --mesh dp=2,tp=2 examples/mesh_tour.py
"""

from __future__ import annotations

import numpy as np

import meshlib as dist


def show(line: str) -> None:
    """Print ``line`` once if it is the same on all ranks, else each rank's line."""
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
    """Show a mesh of any shape."""
    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    rank = dist.get_rank()
    names = mesh.mesh_dim_names or ()
    outer, inner = names[0], names[-1]

    title("The mesh and this rank's place in it")
    show(f"{mesh.shape = }")
    show(f"{mesh.mesh.tolist() = }")
    show(f"{names = }")
    show(f"{outer = }")
    show(f"{inner = }")
    show(f"{mesh.get_coordinate() = }")
    show(f"{mesh.get_local_rank(outer) = }")

    title("Slices: each rank gets its own slice")
    show(f"{mesh[outer].mesh.tolist() = }")
    show(f"{mesh[inner].mesh.tolist() = }")
    show(f"{mesh[names[::-1]].mesh.tolist() = }")

    title("Groups")
    show(f"{mesh[inner].get_group().rank() = }")
    show(f"{dist.get_process_group_ranks(mesh.get_group(inner)) = }")

    title("Flattened: several dims as one")
    mesh.flatten("all")
    show(f"{mesh['all'].size() = }")

    title("A mesh is a group of ranks: collectives are its methods")
    show(f"{mesh[inner].all_reduce(np.array([rank])) = }")
    show(f"{mesh[outer].all_reduce(np.array([rank]), op=dist.ReduceOp.MAX) = }")
    show(f"{mesh.all_reduce(np.array([1.0]), op=dist.ReduceOp.SUM) = }")
    show(f"{mesh[outer].broadcast(np.array([10 * rank]), group_src=0) = }")
    size = mesh[inner].size()
    gathered = np.empty(size, dtype=int)
    show(f"{mesh[inner].all_gather_into_tensor(gathered, np.array([rank])) = }")
    own = np.empty(1, dtype=int)
    rows = rank + 10 * np.arange(size)
    show(f"{mesh[inner].reduce_scatter_tensor(own, rows) = }")

    title("Asynchronously: compute while the bytes travel")
    work = mesh.all_reduce(np.array([rank + 1]), async_op=True)
    show(f"{work.result() = }")

    title("The same calls as c10d's functions")
    show(f"{dist.all_reduce(np.array([rank]), group=mesh[outer]) = }")
    show(f"{dist.get_world_size(mesh[inner]) = }")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
