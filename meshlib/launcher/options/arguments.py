"""The command line of ``meshrun``: torchrun's flags, and what they mean for one launch."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from meshlib import __version__
from meshlib.command_line import OneLineParser, told
from meshlib.launcher.options.launch import LaunchOptions, NodeOptions, Program
from meshlib.launcher.options.monitor import OPTION, page_address, with_address
from meshlib.launcher.options.nodes import ask_engine, node_options, patience_under_engine
from meshlib.launcher.options.notes import hidden_packages, stray_options
from meshlib.launcher.ranks.output import OutputOptions, parse_streams
from transport.deadline import read_duration
from transport.launch_environments import DEFAULT_PORT
from transport.net.tls import tls_from_environment

_DESCRIPTION = """\
Start the ranks of a job on this node, watch them, and end all of them when one fails.

  meshrun --nproc-per-node 4 train.py --epochs 3
  meshrun --mesh dp=2,tp=2 train.py
  meshrun --mesh train.toml -m my_package.train
"""


def parse(argv: Sequence[str] | None = None) -> LaunchOptions:
    """Return what ``argv`` (default: the process's arguments) asks for.

    Ends the process with a message and exit code 2 when it makes no sense.
    """
    parser = make_parser()
    words = sys.argv[1:] if argv is None else argv
    given = parser.parse_args(with_address(parser, words))
    try:
        options = _launch_options(given)
        strays = stray_options(given, parser.get_default)
        return replace(options, warnings=(*strays, *hidden_packages(options.program)))
    except (ValueError, OSError) as error:
        parser.error(told(error))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``meshrun``'s command line."""
    parser = OneLineParser(
        prog="meshrun",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add(
        parser,
        "--nproc-per-node",
        "-n",
        "-np",
        metavar="N",
        help="ranks on this node: a number, cpu, gpu, or auto (gpu where there is one);"
        " default: what --mesh needs, or 1",
    )
    _add(
        parser,
        "--mesh",
        metavar="MESH",
        help="the mesh, as dp=2,tp=2 or as a file with a mesh table: gives the number of ranks,"
        " and init_device_mesh() without arguments makes it",
    )
    _add(
        parser,
        "--max-restarts",
        type=_number(int, "a number of restarts >= 0"),
        metavar="N",
        help="how often all ranks are started again after a failure; default 0",
    )
    _add(
        parser,
        "--on-failure",
        choices=("stop", "continue"),
        help="whether a rank's failure ends the others (default), or they go on: for programs that"
        " can do without it (parallel.elastic, remote calls). The job then ends as its first rank"
        " does that is left",
    )
    _add(
        parser,
        "--replace",
        type=_number(int, "a number of replacements >= 1"),
        metavar="N",
        help="start another rank for a lost one, on its node, up to N times there: it joins the"
        " others (parallel.elastic); implies --on-failure continue",
    )
    _add(
        parser,
        "--spares",
        type=_number(int, "a number of ranks >= 0"),
        metavar="N",
        help="start N more ranks on each node, which wait to take the places of lost ones; implies"
        " --on-failure continue",
    )
    _add(
        parser,
        "--grace-period",
        type=_number(_seconds, "a number of seconds >= 0, or 30s or 10m"),
        metavar="SECONDS",
        help="what ranks get between SIGTERM and SIGKILL; default 3 after a failure or Ctrl-C,"
        " 30 (25 under Slurm) when meshrun itself is told to end",
    )
    _add(
        parser,
        "--start",
        choices=("fork", "exec"),
        help="fork: ranks come out of one process that has imported NumPy and meshlib for them;"
        " exec: each is a Python of its own; default: fork, for a program that is alone exec",
    )
    _add(
        parser,
        OPTION,
        nargs="?",
        const=page_address(""),
        type=page_address,
        metavar="[HOST:]PORT",
        help="serve a page on which the running job can be seen, for whoever knows the token that"
        " is printed; default: any port of the loopback",
    )
    _add(parser, "-v", "--verbose", action="store_true", help="say what the launcher does")
    _add(parser, "--version", action="version", version=f"meshrun {__version__}")
    _add_nodes(parser.add_argument_group("several nodes"))
    _add_output(parser.add_argument_group("output"))
    _add_program(parser.add_argument_group("program"))
    return parser


def _add_nodes(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    _add(
        group,
        "--nnodes",
        metavar="N",
        help="how many nodes: N, or MIN:MAX; default: what the engine says that started meshrun"
        " (Slurm and others), or 1",
    )
    _add(group, "--node-rank", type=int, metavar="R", help="which one this is; default: by arrival")
    _add(group, "--master-addr", metavar="HOST", help="the address of the node that leads, node 0")
    _add(
        group,
        "--master-port",
        type=int,
        metavar="PORT",
        help=f"its port; default: any for one node, {DEFAULT_PORT} for several",
    )
    _add(group, "--rdzv-endpoint", metavar="HOST:PORT", help="both of them in one")
    _add(
        group,
        "--rdzv-backend",
        metavar="NAME",
        help="static (every node has its --node-rank) or store (the first agent that can serves"
        " the store; c10d is the same); default: static with --node-rank, else store",
    )
    _add(group, "--rdzv-id", metavar="NAME", help="the job's name: must be equal")
    _add(
        group,
        "--rdzv-conf",
        metavar="KEY=SECONDS,...",
        help="join_timeout=600, last_call_timeout=30 (wait for more than MIN nodes),"
        " heartbeat_timeout=10 (a silent node is lost), is_host=0 or 1 (serve the store)",
    )
    _add(group, "--role", help=argparse.SUPPRESS)  # torchx gives it: there is one kind of rank
    _add(group, "--local-addr", metavar="HOST", help="this node's address for other nodes' ranks")
    _add(
        group,
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="the job's secret in hexadecimal digits, equal on all nodes; default: MESHLIB_SECRET,"
        " or what `meshlib secret` has written",
    )
    _add(group, "--standalone", action="store_true", help="one node, whatever the engine says")


def _add_output(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    _add(
        group,
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="keep each rank's output, error file and flight records in"
        " DIR/RUN/attempt_N/RANK; implies --tee 3 unless -r or -t is given",
    )
    _add(
        group,
        "-r",
        "--redirects",
        metavar="STREAMS",
        help="write to files only: 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:STREAMS,...",
    )
    _add(group, "-t", "--tee", metavar="STREAMS", help="write to files as well as here")
    _add(
        group,
        "--local-ranks-filter",
        metavar="RANKS",
        help="show only these local ranks' output: 0,2",
    )
    _add(group, "--prefix", action="store_true", help="begin each line with its rank")
    _add(
        group,
        "--trace-dir",
        type=Path,
        metavar="DIR",
        help="where ranks write their flight records; default: in --log-dir",
    )


def _add_program(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    kind = group.add_mutually_exclusive_group()
    _add(kind, "-m", "--module", action="store_true", help="PROGRAM is a module, as in python -m")
    _add(kind, "--no-python", action="store_true", help="PROGRAM is anything executable")
    group.add_argument("program", metavar="PROGRAM", help="what each rank runs: a Python script")
    group.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="the program's own arguments"
    )


def _add(container: argparse._ActionsContainer, *names: str, **details: Any) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add an option; its name with underscores for dashes works too, unadvertised."""
    action = container.add_argument(*names, **details)
    twins = [name for name in names if name.startswith("--") and "-" in name[2:]]
    for name in twins:
        hidden: dict[str, Any] = dict.fromkeys(("help", "default"), argparse.SUPPRESS)
        hidden["dest"] = action.dest
        container.add_argument("--" + name[2:].replace("-", "_"), **{**details, **hidden})


def _seconds(text: str) -> float:
    read = read_duration(text)
    return float(text) if read is None else read


def _number(kind: Callable[[str], float], expected: str) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


def _launch_options(given: argparse.Namespace) -> LaunchOptions:
    tls_from_environment()  # or an error before anything starts
    notes = ask_engine(given, os.environ)
    nodes = node_options(given)
    ranks, mesh = _ranks_and_mesh(given.nproc_per_node, given.mesh, nodes)
    options = LaunchOptions(
        program=_program(given),
        ranks=ranks,
        start=given.start or ("fork" if ranks > 1 else "exec"),
        mesh=mesh,
        nodes=nodes,
        output=_output(given, ranks),
        trace_dir=given.trace_dir,
        monitor=given.monitor,
        max_restarts=given.max_restarts or 0,
        on_failure=_on_failure(given),
        replace=given.replace or 0,
        spares=given.spares or 0,
        verbose=given.verbose,
        notes=notes,
        **patience_under_engine(os.environ),
    )
    if given.grace_period is None:
        return options
    grace: float = given.grace_period
    return replace(options, failure_grace=grace, signal_grace=grace)


def _on_failure(given: argparse.Namespace) -> Literal["stop", "continue"]:
    if given.replace == 0:
        raise ValueError(
            "--replace 0 replaces nobody: expected a number from 1 on, or --on-failure continue,"
            " with which the others go on without a lost rank"
        )
    others = f"--replace {given.replace}" if given.replace else f"--spares {given.spares}"
    if not given.replace and not given.spares:
        return given.on_failure or "stop"
    if given.on_failure == "stop":
        raise ValueError(
            f"{others} and --on-failure stop were both given: ranks come for lost ones only where"
            " the others go on; expected --on-failure continue, or neither"
        )
    return "continue"


def _program(given: argparse.Namespace) -> Program:
    target: str = given.program
    arguments = tuple[str, ...](given.arguments)
    if given.module:
        return Program("module", target, arguments)
    if given.no_python:
        if shutil.which(target) is None:
            raise ValueError(f"program {target!r} is not an executable that can be found")
        return Program("program", target, arguments)
    if not os.path.exists(target):
        raise ValueError(f"script {target!r} does not exist (in {os.getcwd()})")
    return Program("script", target, arguments)


def _ranks_and_mesh(
    count: str | None, mesh: str | None, nodes: NodeOptions
) -> tuple[int, str | None]:
    """Return the ranks on this node, and the mesh as ranks are told it."""
    ranks = None if count is None else _rank_count(count)
    if mesh is None:
        return ranks or 1, None
    from meshlib.mesh.config import MeshConfig

    try:
        config = MeshConfig.parse(mesh)
    except (OSError, ImportError) as error:
        raise ValueError(f"--mesh {told(error)} (in {os.getcwd()})") from None
    if nodes.least != nodes.most:
        raise ValueError(
            f"--mesh {mesh} needs a fixed number of ranks, but --nnodes is"
            f" {nodes.least}:{nodes.most}; expected one number of nodes"
        )
    if ranks is not None:
        config.resolve(ranks * nodes.most)
        return ranks, config.to_text()
    if config.world_size is None:
        raise ValueError(
            f"--mesh {mesh} has a dim of size -1 to be inferred: expected --nproc-per-node with it"
        )
    if config.world_size % nodes.most:
        raise ValueError(
            f"--mesh {mesh} has {config.world_size} ranks, which {nodes.most} nodes cannot share"
            " equally; expected --nproc-per-node with it"
        )
    return config.world_size // nodes.most, config.to_text()


def _rank_count(text: str) -> int:
    if text == "cpu":
        return count_cpus()
    if text in ("gpu", "auto"):
        gpus = count_gpus()
        if gpus == 0 and text == "gpu":
            raise ValueError("--nproc-per-node gpu: this node has no visible GPU")
        return gpus or count_cpus()
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(
            f"--nproc-per-node: expected a number of ranks >= 1, cpu, gpu or auto; got {text!r}"
        )
    return count


def _output(given: argparse.Namespace, ranks: int) -> OutputOptions:
    log_dir: Path | None = given.log_dir
    redirects, tee = ((given.redirects, "--redirects"), (given.tee, "--tee"))
    if log_dir is None:
        if redirects[0] is not None:
            raise ValueError(f"--redirects {redirects[0]} needs --log-dir DIR for the files")
        if tee[0] is not None:  # everything is shown, as asked; torchx says so to every launcher
            _streams(*tee, ranks)
            tee = (None, "--tee")
    if log_dir is not None and redirects[0] is None and tee[0] is None:
        tee = ("3", "--tee")
    shown = given.local_ranks_filter
    return OutputOptions(
        log_dir=log_dir,
        redirects=_streams(*redirects, ranks),
        tee=_streams(*tee, ranks),
        shown=None if shown is None else _local_ranks(shown, ranks),
        prefix=given.prefix,
    )


def _streams(text: str | None, name: str, ranks: int) -> dict[int | None, int]:
    if text is None:
        return {}
    try:
        result = parse_streams(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for rank in result:
        if rank is not None and rank >= ranks:
            raise ValueError(f"{name} {text}: there are local ranks 0 to {ranks - 1}, not {rank}")
    return result


def _local_ranks(text: str, ranks: int) -> frozenset[int]:
    try:
        chosen = frozenset(int(item) for item in text.split(","))
    except ValueError:
        chosen = frozenset({-1})
    if not chosen <= set(range(ranks)):
        raise ValueError(
            f"--local-ranks-filter: expected local ranks between 0 and {ranks - 1}, as 0,2;"
            f" got {text!r}"
        )
    return chosen


_GPU_NODE = re.compile(r"nvidia\d+")


def count_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count_gpus(devices: str = "/dev") -> int:
    """Return the number of NVIDIA GPUs that ranks here would see, without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        present = sum(1 for name in os.listdir(devices) if _GPU_NODE.fullmatch(name))
    except OSError:
        present = 0
    if visible is None:
        return present
    # A negative or empty entry ends the list; a GPU may be named by number or UUID.
    count = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return min(count, present)
