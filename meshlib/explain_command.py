"""``meshlib explain``: what a mesh, a redistribution on it, or a pipeline will look like."""

from __future__ import annotations

import importlib
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from meshlib.command_line import OneLineParser, print_result
from meshlib.mesh.config import MeshConfig
from meshlib.mesh.explain import explain
from meshlib.mesh.read_config import SUFFIXES_IN_WORDS

if TYPE_CHECKING:
    from meshlib.mesh.device_mesh import DeviceMesh


def main(argv: Sequence[str] | None = None) -> int:
    """Print the mesh that ``argv`` names; return the exit code: 0, or 2 for wrong input."""
    parser = OneLineParser(
        prog="meshlib explain",
        description=(
            "Print the ranks, coordinates and groups of a mesh, the plan of a redistribution on it,"
            " or the schedule of a pipeline. Starts no process."
        ),
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "file",
        nargs="?",
        metavar="MESH",
        help=f"a {SUFFIXES_IN_WORDS} file with a [mesh] table, or the mesh itself: dp=2,tp=2",
    )
    what.add_argument("--mesh", metavar="DIMS", help="the mesh itself, such as dp=2,tp=2")
    what.add_argument(
        "--schedule", metavar="NAME", help="a pipeline's, such as 1F1B, or a .csv file"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="the number of ranks (default: as the mesh says)",
    )
    parser.add_argument("--rank", type=int, metavar="R", help="print this rank's part only")
    run = parser.add_argument_group("what a run of a program takes, besides")
    run.add_argument(
        "--estimate", metavar="PROGRAM.py", help="its explain(file, mesh) is called, and printed"
    )
    run.add_argument("--over", metavar="DIMS", help="another mesh than the file's")
    parser.add_argument(
        "--network",
        metavar="FILE",
        help="also on which levels each group goes over a network that meshlib bench --between"
        " --write-network has measured",
    )
    plan = parser.add_argument_group("the plan that lays an array out anew, instead of the mesh")
    plan.add_argument("--from", dest="source", metavar="SPEC", help="such as 'dp, None'")
    plan.add_argument("--to", dest="target", metavar="SPEC", help="such as 'None, (dp, tp)'")
    plan.add_argument("--shape", metavar="LENGTHS", help="of the global array: 4096,1024")
    plan.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    plan.add_argument(
        "--to-mesh", metavar="DIMS[@RANK]", help="another mesh for --to, from RANK on: x=4@8"
    )
    pipeline = parser.add_argument_group("the pipeline of --schedule")
    pipeline.add_argument("--stages", type=int, metavar="N", help="parts of the model")
    pipeline.add_argument("--microbatches", type=int, metavar="N", help="parts of a batch")
    pipeline.add_argument("--ranks", type=int, metavar="N", help="(default: as the schedule says)")
    pipeline.add_argument("--costs", metavar="TIMES", help="of actions (default: F=1,B=2,I=1,W=1)")
    pipeline.add_argument("--message", type=float, default=0.0, metavar="TIME", help="of a message")
    pipeline.add_argument("--picture", metavar="FILE", help="draw it, too; needs matplotlib")
    given = parser.parse_args(argv)
    wanted = (given.source, given.target, given.shape)
    if any(one is not None for one in wanted) and None in wanted:
        parser.error("--from, --to and --shape are given together")

    if given.estimate is not None and given.file is None:
        parser.error("--estimate goes with a file, which says what is run")
    if given.over is not None and given.estimate is None:
        parser.error("--over goes with --estimate")

    of_pipelines = ("stages", "microbatches", "ranks", "costs", "picture")
    for name in of_pipelines if given.schedule is None else ():
        if getattr(given, name) is not None:
            parser.error(f"--{name} goes with --schedule")

    def make() -> str:
        if given.schedule is not None:
            return _explain_schedule(given)
        if given.mesh is not None or given.over is not None:
            config = MeshConfig.from_string(given.mesh or given.over)
        elif "=" in given.file:
            config = MeshConfig.parse(given.file)
        else:
            config = MeshConfig.load(Path(given.file))
        if given.source is not None:
            from meshlib.sharding.explain import explain_plan

            return explain_plan(
                config,
                given.world_size,
                *wanted,
                dtype=given.dtype,
                to_mesh=given.to_mesh,
                rank=given.rank,
            )
        text = explain(config, given.world_size, given.rank)
        if given.network is not None:
            text += "\n" + _levels(Path(given.network), config, given.world_size)
        if given.estimate is not None:
            mesh = config.mesh_for(given.world_size or config.world_size or 1)
            text += "\n" + _estimate_of(Path(given.estimate))(Path(given.file), mesh)
        return text

    return print_result(parser.prog, make)


def _levels(file: Path, config: MeshConfig, world_size: int | None) -> str:
    from meshlib.bench.network import HostNetwork, levels_of_groups

    network = HostNetwork.load(file)
    mesh = config.mesh_for(world_size or config.world_size or 1)
    names = [*config.names, *(name for name, _ in config.flattened)]
    groups = {
        name: mesh[name].slices().reshape(mesh[name].slice_count, -1).tolist() for name in names
    }
    return "\n".join(levels_of_groups(network, groups)) + "\n"


def _explain_schedule(given: Namespace) -> str:
    # Schedules are of the floor above, which is looked up by name, as commands are.
    module = importlib.import_module("parallel.pipeline.explain")
    explain_schedule: Callable[..., str] = module.explain_schedule
    return explain_schedule(
        given.schedule,
        given.stages,
        given.microbatches,
        given.ranks,
        given.costs,
        given.message,
        given.picture,
    )


def _estimate_of(program: Path) -> Callable[[Path, DeviceMesh], str]:
    """Return the function ``explain`` of a program; raise ValueError where there is none."""
    found = runpy.run_path(str(program), run_name="meshlib.explain").get("explain")
    if not callable(found):
        raise ValueError(f"{program} has no function explain(file, mesh)")
    return cast("Callable[[Path, DeviceMesh], str]", found)


if __name__ == "__main__":
    sys.exit(main())
