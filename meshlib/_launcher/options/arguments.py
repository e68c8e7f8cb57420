"""Parses the command line of ``meshrun``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from meshlib._command_line import message_of
from meshlib._launcher.options.hosts import host_options, refuse_without_hosts
from meshlib._launcher.options.launch import (
    FAILURE_GRACE_SECONDS,
    SIGNAL_GRACE_SECONDS,
    SLURM_GRACE_SECONDS,
    LaunchOptions,
    NodeOptions,
    RankProgram,
)
from meshlib._launcher.options.nodes import fill_from_engine, gets_engine_signals, node_options
from meshlib._launcher.options.numa import cpus_of_ranks
from meshlib._launcher.options.output import OutputOptions, parse_streams
from meshlib._launcher.options.parser import make_parser, with_address
from transport import _environment as environment
from transport._platform import available_cores


def parse(
    argv: Sequence[str] | None = None, decided: Mapping[str, object] | None = None
) -> LaunchOptions:
    """Return the launch described by ``argv`` (by default the process's arguments).

    The options in ``decided``, by name, override ``argv``. If the options are invalid, ends the
    process with a message and exit code 2.
    """
    parser = make_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    given = parser.parse_args(with_address(parser, words))
    vars(given).update(decided or {})
    try:
        if given.hosts is not None:
            return LaunchOptions(_program(given), 0, hosts=host_options(given, words))
        refuse_without_hosts(given, decided)
        options = _launch_options(given)
        strays = stray_options(given, parser.get_default)
        return replace(options, warnings=(*strays, *hidden_packages(options.program)))
    except (ValueError, OSError) as error:
        parser.error(message_of(error))


def _launch_options(given: argparse.Namespace) -> LaunchOptions:
    if any(map(os.environ.get, environment.TLS)):
        # Imported only for TLS, because it would double the time of imports.
        from transport._net.tls_choice import tls_from_environment

        tls_from_environment()  # raises its errors before anything starts
    notes = fill_from_engine(given, os.environ)
    nodes = node_options(given)
    ranks, mesh = _ranks_and_mesh(given.nproc_per_node, given.mesh, nodes)
    grace: float | None = given.grace_period
    engine_signals = gets_engine_signals(os.environ)
    last_grace = SLURM_GRACE_SECONDS if engine_signals else SIGNAL_GRACE_SECONDS
    return LaunchOptions(
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
        failure_grace=FAILURE_GRACE_SECONDS if grace is None else grace,
        signal_grace=last_grace if grace is None else grace,
        engine_signals=engine_signals,
        cpus=cpus_of_ranks(ranks) if given.numa else (),
    )


def _on_failure(given: argparse.Namespace) -> Literal["stop", "continue"]:
    if given.replace == 0:
        raise ValueError(
            "--replace 0 replaces no rank: expected a number from 1 on, or --on-failure continue,"
            " with which the other ranks continue without a lost one"
        )
    others = f"--replace {given.replace}" if given.replace else f"--spares {given.spares}"
    if not given.replace and not given.spares:
        return given.on_failure or "stop"
    if given.on_failure == "stop":
        raise ValueError(
            f"{others} and --on-failure stop were both given: lost ranks are replaced only if the"
            " others continue; expected --on-failure continue, or neither"
        )
    return "continue"


def _program(given: argparse.Namespace) -> RankProgram:
    target: str = given.program
    arguments = tuple[str, ...](given.arguments)
    if given.module:
        return RankProgram("module", target, arguments)
    if given.no_python:
        import shutil

        if shutil.which(target) is None:
            raise ValueError(f"program {target!r} is not an executable that can be found")
        return RankProgram("program", target, arguments)
    if not os.path.exists(target):
        raise ValueError(f"script {target!r} does not exist (in {os.getcwd()})")
    return RankProgram("script", target, arguments)


def _ranks_and_mesh(
    count: str | None, mesh: str | None, nodes: NodeOptions
) -> tuple[int, str | None]:
    """Return the number of ranks on this node, and the text of the mesh for the ranks."""
    ranks = None if count is None else _rank_count(count)
    if mesh is None:
        return ranks or 1, None
    from meshlib._mesh.config import MeshConfig

    try:
        config = MeshConfig.parse(mesh)
    except (OSError, ImportError) as error:
        raise ValueError(f"--mesh {message_of(error)} (in {os.getcwd()})") from None
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
            f"--mesh {mesh} has {config.world_size} ranks, which is not a multiple of {nodes.most}"
            " nodes; expected --nproc-per-node with it"
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
    redirects, tee = given.redirects, given.tee
    if log_dir is None and redirects is not None:
        raise ValueError(f"--redirects {redirects} needs --log-dir DIR for the files")
    if log_dir is not None and redirects is None and tee is None:
        tee = "3"
    teed = _streams(tee, "--tee", ranks)
    shown = given.local_ranks_filter
    return OutputOptions(
        log_dir=log_dir,
        redirects=_streams(redirects, "--redirects", ranks),
        # --tee without files means the console alone; torchx always passes it.
        tee={} if log_dir is None else teed,
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


_ROOT = Path(__file__).parents[3]
_PACKAGES = ("meshlib", "transport", "parallel")  # in the same folder
_GPU_NODE = re.compile(r"nvidia\d+")


def count_cpus() -> int:
    """Return the number of cores that this process may use."""
    return available_cores()


def count_gpus(devices: str = "/dev") -> int:
    """Return the number of NVIDIA GPUs that are visible to ranks, without loading CUDA."""
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


_STRAY_OPTIONS = (
    "--nproc-per-node",
    "--mesh",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv",
    "--rdzv-endpoint",
    "--rdzv-backend",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--replace",
    "--spares",
    "--standalone",
)
"""Options that few programs have and that change the launch."""


def stray_options(given: argparse.Namespace, default: Callable[[str], object]) -> list[str]:
    """Return a note for each option of meshrun among the program's arguments.

    The program may have an option of that name, so options that meshrun also got are not noted.
    """
    arguments: list[str] = given.arguments
    names = [word.partition("=")[0].replace("_", "-") for word in arguments]
    return [
        f"{name} is after {given.program}, so the program gets it, not meshrun;"
        f" for meshrun: meshrun {name} ... {given.program}"
        for name in dict.fromkeys(names)
        if name in _STRAY_OPTIONS
        and getattr(given, dest := name[2:].replace("-", "_")) in (None, default(dest))
    ]


def hidden_packages(program: RankProgram) -> list[str]:
    """Return a note for each package of meshlib that a file next to ``program`` hides from it."""
    if program.kind == "program":
        return []
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if not os.environ.get("PYTHONSAFEPATH"):
        script = os.path.realpath(program.target)
        folder = script if os.path.isdir(script) else os.path.dirname(script)
        path.insert(0, folder if program.kind == "script" else os.getcwd())
    notes: list[str] = []
    for name in _PACKAGES:
        found = PathFinder.find_spec(name, path)
        if found is None or found.origin is None:
            continue
        if Path(found.origin).resolve() != (_ROOT / name / "__init__.py").resolve():
            notes.append(
                f"{found.origin} hides meshlib's package {name!r} from the program: rename it if"
                " the program or meshlib needs that package"
            )
    return notes
