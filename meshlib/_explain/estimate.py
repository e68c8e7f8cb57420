"""Estimates of a run on a mesh, by the program's own formulas."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import cast

from meshlib._explain.mesh import add_world_size, explain_mesh, needed_ranks, read_mesh
from meshlib._mesh.device_mesh import DeviceMesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which program, what it runs, and on which mesh."""
    parser.add_argument(
        "program", type=Path, metavar="PROGRAM.py", help="its explain(file, mesh) is called"
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="what is run; its [mesh] table is the mesh"
    )
    parser.add_argument("--over", metavar="DIMS", help="another mesh than the file's: dp=2,tp=2")
    add_world_size(parser)


def explain(given: argparse.Namespace) -> str:
    """Return the mesh, and what the program says of a run on it."""
    config = read_mesh(given.over or str(given.file))
    text = explain_mesh(config, given.world_size)
    mesh = config.mesh_for(needed_ranks(config, given.world_size))
    return text + "\n" + _estimator(given.program)(given.file, mesh)


def _estimator(program: Path) -> Callable[[Path, DeviceMesh], str]:
    """Return the function ``explain`` of a program; raise ValueError where there is none."""
    found = runpy.run_path(str(program), run_name="meshlib._explain").get("explain")
    if not callable(found):
        raise ValueError(f"{program} has no function explain(file, mesh)")
    return cast("Callable[[Path, DeviceMesh], str]", found)
