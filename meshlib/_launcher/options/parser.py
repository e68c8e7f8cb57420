"""The argparse parser of ``meshrun``: torchrun's flags and additional ones."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshlib import __version__
from meshlib._command_line import OneLineParser
from transport._launch_environments import DEFAULT_PORT
from transport._net import LOOPBACK
from transport._waiting.deadline import read_duration

_DESCRIPTION = """\
Start the ranks of a job on this node, watch them, and end all of them when one fails.

  meshrun --nproc-per-node 4 train.py --epochs 3
  meshrun --mesh dp=2,tp=2 train.py
  meshrun --mesh train.toml -m my_package.train
"""
_MONITOR = "--monitor"
"""An option whose value is optional."""
_ADDRESS = re.compile(r"(?:(?P<host>[^/]*):)?(?P<port>\d+)")


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
        help="ranks on this node: a number, cpu, gpu, or auto (gpu if there is one);"
        " default: what --mesh needs, or 1",
    )
    _add(
        parser,
        "--mesh",
        metavar="MESH",
        help="the mesh, as dp=2,tp=2 or a file with a mesh table: sets the number of ranks and the"
        " mesh of init_device_mesh() without arguments",
    )
    _add(
        parser,
        "--max-restarts",
        type=_number(int, "a number of restarts >= 0"),
        metavar="N",
        help="how often all ranks are restarted after a failure; default 0",
    )
    _add(
        parser,
        "--on-failure",
        choices=("stop", "continue"),
        help="whether the other ranks end (default) or continue after a rank's failure; for"
        " programs that support it (parallel.elastic, remote calls). The job's result is then that"
        " of its first remaining rank",
    )
    _add(
        parser,
        "--replace",
        type=_number(int, "a number of replacements >= 1"),
        metavar="N",
        help="replace up to N lost ranks per node by new ranks on the same node, which join the"
        " others (parallel.elastic); implies --on-failure continue",
    )
    _add(
        parser,
        "--spares",
        type=_number(int, "a number of ranks >= 0"),
        metavar="N",
        help="start N more ranks on each node, which wait to replace lost ranks; implies"
        " --on-failure continue",
    )
    _add(
        parser,
        "--grace-period",
        type=_number(_seconds, "a number of seconds >= 0, or 30s or 10m"),
        metavar="SECONDS",
        help="the time between SIGTERM and SIGKILL; default 3 after a failure or Ctrl-C,"
        " 30 (25 under Slurm) when meshrun itself is told to end",
    )
    _add(
        parser,
        "--start",
        choices=("fork", "exec"),
        help="fork: ranks are forked from one process that has imported NumPy and meshlib;"
        " exec: each rank is a separate Python; default: fork, or exec for a single rank",
    )
    _add(
        parser,
        _MONITOR,
        nargs="?",
        const=_page_address(""),
        type=_page_address,
        metavar="[HOST:]PORT",
        help="serve a web page that shows the running job; access requires the printed token;"
        " default: any port of the loopback",
    )
    _add(
        parser,
        "--numa",
        action="store_true",
        help="bind each rank to the CPUs of one NUMA node; ranks are spread evenly",
    )
    _add(parser, "-v", "--verbose", action="store_true", help="print what the launcher does")
    _add(parser, "--version", action="version", version=f"meshrun {__version__}")
    _add_nodes(parser.add_argument_group("several nodes"))
    _add_hosts(parser.add_argument_group("several nodes, started from here over ssh"))
    _add_output(parser.add_argument_group("output"))
    _add_program(parser.add_argument_group("program"))
    return parser


def _add_nodes(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    _add(
        group,
        "--nnodes",
        metavar="N",
        help="the number of nodes: N, or MIN:MAX; default: that of the engine that started meshrun"
        " (Slurm and others), or 1",
    )
    _add(group, "--node-rank", type=int, metavar="R", help="the node's number; default: by arrival")
    _add(group, "--master-addr", metavar="HOST", help="the address of the leading node, node 0")
    _add(
        group,
        "--master-port",
        type=int,
        metavar="PORT",
        help=f"its port; default: any for one node, {DEFAULT_PORT} for several",
    )
    _add(group, "--rdzv-endpoint", metavar="HOST:PORT", help="both in one option")
    _add(
        group,
        "--rdzv",
        metavar="URL",
        help="etcd://HOST:PORT[,HOST:PORT...]/PREFIX: use a store in etcd, so that the job outlives"
        " each of its nodes; default: MESHLIB_RDZV",
    )
    _add(
        group,
        "--rdzv-backend",
        metavar="NAME",
        help="static (every node has its --node-rank) or store (the first agent that is able to"
        " serves the store; same as c10d); default: static with --node-rank, else store",
    )
    _add(group, "--rdzv-id", metavar="NAME", help="the job's name, equal on all nodes")
    _add(
        group,
        "--rdzv-conf",
        metavar="KEY=SECONDS,...",
        help="join_timeout=600, last_call_timeout=30 (wait for more than MIN nodes),"
        " heartbeat_timeout=10 (a silent node is lost), is_host=0 or 1 (serve the store)",
    )
    _add(group, "--role", help=argparse.SUPPRESS)  # torchx passes it; ignored
    _add(group, "--local-addr", metavar="HOST", help="this node's address for other nodes' ranks")
    _add(
        group,
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="the job's secret in hexadecimal digits, equal on all nodes; default: MESHLIB_SECRET,"
        " or the file of `meshlib secret`",
    )
    _add(group, "--standalone", action="store_true", help="run on one node and ignore the engine")


def _add_hosts(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    _add(
        group,
        "--hosts",
        metavar="HOST[:RANKS],...",
        help="start meshrun on each of these hosts, in this directory; the first one leads",
    )
    _add(
        group,
        "--ssh-command",
        metavar="COMMAND",
        help="the command that runs a command on a host; default: ssh -o BatchMode=yes",
    )
    _add(
        group,
        "--remote-python",
        metavar="PATH",
        help="the Python with meshlib on the hosts; default: the path of this Python",
    )
    _add(
        group,
        "--env",
        action="append",
        metavar="NAME[=VALUE]",
        help="forward a variable, in addition to PYTHONPATH and meshlib's; may be repeated",
    )


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
    _add(group, "-t", "--tee", metavar="STREAMS", help="write to files and to the console")
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
    _add(kind, "--no-python", action="store_true", help="PROGRAM is any executable")
    group.add_argument("program", metavar="PROGRAM", help="each rank's program: a Python script")
    group.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="the program's arguments"
    )


def _add(container: argparse._ActionsContainer, *names: str, **details: Any) -> None:  # pyright: ignore[reportPrivateUsage]
    """Add an option, also with underscores for dashes in its name (not in the help)."""
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


def _page_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``PORT`` or ``HOST:PORT``; empty: any port of the loopback.

    Raises ArgumentTypeError.
    """
    found = _ADDRESS.fullmatch(text or "0")
    if found is None or int(found["port"]) > 65535:
        raise argparse.ArgumentTypeError(f"expected PORT or HOST:PORT, got {text!r}")
    host = found["host"]
    if host is None:
        return LOOPBACK, int(found["port"])
    return host.removeprefix("[").removesuffix("]"), int(found["port"])


def with_address(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``--monitor=`` in place of a ``--monitor`` that no address follows.

    Otherwise argparse would use the program as the option's value.
    """
    words = list(argv)
    actions = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]
    i = 0
    while i < len(words) and words[i].startswith("-"):
        action = actions.get(words[i])
        takes_next = action is not None and action.nargs is None
        if words[i] == _MONITOR:
            takes_next = i + 1 < len(words) and bool(_ADDRESS.fullmatch(words[i + 1]))
            if not takes_next:
                words[i] = f"{_MONITOR}="
        i += 2 if takes_next else 1
    return words
