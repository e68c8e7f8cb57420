"""The ranks of a mesh, their coordinates, and their groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from meshlib._mesh.config import MeshConfig
from meshlib._mesh.device_mesh import DeviceMesh
from meshlib._mesh.read_config import SUFFIXES_IN_WORDS
from meshlib._mesh.spec import DimOptions
from meshlib._mesh.value import described_ranks
from meshlib._plain_text import columns

WHOLE_TABLE = 64
"""The most ranks that are all listed; of more ranks, only the first and last few are."""

SHOWN_RANKS = 8
SHOWN_CHARACTERS = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the mesh, and for the part of it to show."""
    add_mesh(parser)
    parser.add_argument("--rank", type=int, metavar="R", help="print this rank's part only")
    parser.add_argument(
        "--network",
        type=Path,
        metavar="FILE",
        help="also print the network levels of each group; FILE is the result of meshlib bench"
        " --between --write-network",
    )


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the mesh and its number of ranks."""
    parser.add_argument(
        "mesh",
        metavar="MESH",
        help=f"the mesh itself, dp=2,tp=2, or a {SUFFIXES_IN_WORDS} file with a [mesh] table",
    )
    add_world_size(parser)


def add_world_size(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the number of ranks."""
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="the number of ranks (default: that of the mesh)",
    )


def read_mesh(text: str) -> MeshConfig:
    """Return the mesh ``text``, or that of the file with this name.

    Raises the errors of ``MeshConfig.parse`` and ``MeshConfig.load``.
    """
    return MeshConfig.parse(text) if "=" in text else MeshConfig.load(Path(text))


def explain(given: argparse.Namespace) -> str:
    """Return the mesh, and the levels of its groups if a network is given."""
    config = read_mesh(given.mesh)
    text = explain_mesh(config, given.world_size, given.rank)
    if given.network is not None:
        text += "\n" + _levels(given.network, config, given.world_size)
    return text


def _levels(file: Path, config: MeshConfig, world_size: int | None) -> str:
    from meshlib._bench.network import HostNetwork, levels_of_groups

    network = HostNetwork.load(file)
    mesh = config.mesh_for(needed_ranks(config, world_size))
    names = [*config.names, *(name for name, _ in config.flattened)]
    groups = {
        name: mesh[name].slices().reshape(mesh[name].slice_count, -1).tolist() for name in names
    }
    return "\n".join(levels_of_groups(network, groups)) + "\n"


def explain_mesh(config: MeshConfig, world_size: int | None = None, rank: int | None = None) -> str:
    """Return the text for a mesh on ``world_size`` ranks (default: the mesh's product).

    With ``rank``, only that rank's part. Raises ValueError when the degrees do not fit the world
    size, or ``rank`` is out of range.
    """
    world_size = needed_ranks(config, world_size)
    mesh = config.mesh_for(world_size)
    if rank is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not there; expected 0 to {world_size - 1}")
    head = f"mesh {mesh.described()}: {_count(world_size, 'rank')}"
    if config.source != "mesh":
        head += f"  ({config.source.removesuffix(': [mesh]')})"
    parts = [[head], _coordinates(mesh, config, rank), _groups(mesh, config, rank)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def needed_ranks(config: MeshConfig, world_size: int | None) -> int:
    """Return ``world_size``, by default the mesh's; raise ValueError if that has a -1."""
    size = config.world_size if world_size is None else world_size
    if size is None:
        raise ValueError(f"{config.source} {config} has a degree to infer; give --world-size N")
    return size


def _coordinates(mesh: DeviceMesh, config: MeshConfig, rank: int | None) -> list[str]:
    size = mesh.size()
    if rank is not None:
        shown: Iterable[int] = [rank]
    elif size <= WHOLE_TABLE:
        shown = range(size)
    else:
        shown = [*range(SHOWN_RANKS), -1, *range(size - SHOWN_RANKS, size)]
    rows = [["rank", *config.names]]
    for one in shown:
        coordinates = mesh.coordinate_of(one)
        rows.append(
            ["…"] * (mesh.ndim + 1) if coordinates is None else [str(one), *map(str, coordinates)]
        )
    return columns(rows, right=range(mesh.ndim + 1))


def _groups(mesh: DeviceMesh, config: MeshConfig, rank: int | None) -> list[str]:
    rows: list[list[str]] = []
    dims = [(name, name) for name in config.names]
    flattened = [(name, f"{name} ({' × '.join(parts)})") for name, parts in config.flattened]
    for name, shown in [*dims, *flattened]:
        along = mesh[name]
        if rank is None:
            count = f"{_count(along.slice_count, 'group')} of {along.size()}"
            listed = _listed(along)
        else:
            number = along.slice_number(rank)
            place = along.coordinate_of(rank)
            assert place is not None, "checked above"
            count = f"rank {place[0]} of {along.size()}"
            listed = described_ranks(along, number)
        rows.append([f"  {shown}", count, listed, _options(config.options_for(name))])
    title = "groups" if rank is None else f"groups of rank {rank}"
    return [title, *columns(rows)]


def _listed(along: DeviceMesh) -> str:
    """Return all groups if they fit on a line, else the first two and the last."""
    count = along.slice_count
    shown = [described_ranks(along, i) for i in range(min(count, SHOWN_CHARACTERS))]
    everything = " ".join(shown)
    if count <= 3 or (count == len(shown) and len(everything) <= SHOWN_CHARACTERS):
        return everything
    return f"{shown[0]} {shown[1]} … {described_ranks(along, count - 1)}"


def _options(options: DimOptions) -> str:
    parts: list[str] = []
    if options.backend is not None:
        parts.append(f"backend {options.backend}")
    if options.timeout is not None:
        parts.append(f"timeout {options.timeout:g} s")
    if options.compress is not None:
        parts.append(f"reductions as {options.compress}")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
