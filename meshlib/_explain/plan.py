"""The plan that redistributes an array: collectives, and bytes on the wire."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from meshlib._explain.mesh import add_mesh, needed_ranks, read_mesh
from meshlib._mesh.config import MeshConfig
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib.sharding._sharding import Sharding
from meshlib.sharding._spec import parse_spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the mesh, the array, and its shardings before and after."""
    add_mesh(parser)
    add = parser.add_argument
    add("--from", dest="source", required=True, metavar="SPEC", help="such as 'dp, None'")
    add("--to", dest="target", required=True, metavar="SPEC", help="such as 'None, (dp, tp)'")
    add("--shape", required=True, metavar="LENGTHS", help="of the global array: 4096,1024")
    add("--dtype", default="float32", help="(default: %(default)s)")
    add("--to-mesh", metavar="DIMS[@RANK]", help="another mesh for --to, from RANK on: x=4@8")
    add("--rank", type=int, metavar="R", help="also print this rank's part before and after")


def explain(given: argparse.Namespace) -> str:
    """Return the plan."""
    return explain_plan(
        read_mesh(given.mesh),
        given.world_size,
        given.source,
        given.target,
        given.shape,
        dtype=given.dtype,
        to_mesh=given.to_mesh,
        rank=given.rank,
    )


def explain_plan(
    config: MeshConfig,
    world_size: int | None,
    source: str,
    target: str,
    shape: str,
    dtype: str = "float32",
    to_mesh: str | None = None,
    rank: int | None = None,
) -> str:
    """Return the plan from one sharding to another as text, and the parts of ``rank`` if given.

    Args:
        config: The mesh.
        world_size: The number of ranks; None means that of the mesh.
        source: The spec before, such as ``"dp, None, (cp, tp); sum: tp"``.
        target: The spec after.
        shape: The global shape, ``"4096,4096"``.
        dtype: The name of the array's dtype.
        to_mesh: The mesh of the target, ``"x=4"``, or ``"x=4@8"`` from rank 8 on.
        rank: The rank whose parts are shown.

    Raises:
        ValueError: For arguments that do not match.
    """
    mesh = config.mesh_for(needed_ranks(config, world_size))
    other = mesh if to_mesh is None else _second_mesh(to_mesh)
    before, after = (
        Sharding(where, *parse_spec(text)) for where, text in ((mesh, source), (other, target))
    )
    lengths = _lengths(shape)
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"dtype {dtype!r} is unknown; expected a name like float32") from None
    lines = [str(before.plan(after, lengths, wanted))]
    if rank is not None:
        for title, sharding in (("before", before), ("after", after)):
            if sharding.mesh.coordinate_of(rank) is None:
                lines.append(f"  rank {rank} {title}: nothing")
                continue
            parts = ", ".join(f"{s.start}:{s.stop}" for s in sharding.slices(lengths, rank))
            lines.append(f"  rank {rank} {title}: [{parts}]")
    return "\n".join(lines) + "\n"


def _second_mesh(text: str) -> DeviceMesh:
    dims, _, first = text.partition("@")
    if first and not first.strip().isdecimal():
        raise ValueError(f"--to-mesh {text!r}: expected DIMS or DIMS@FIRST_RANK, such as x=4@8")
    config = MeshConfig.from_string(dims)
    mesh = config.mesh_for(needed_ranks(config, None))
    ranks = mesh.mesh + int(first or 0)
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.mesh_dim_names)


def _lengths(shape: str) -> Sequence[int]:
    words = [word.strip() for word in shape.replace("x", ",").split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--shape {shape!r}: expected lengths such as 4096,1024")
    return [int(word) for word in words]
