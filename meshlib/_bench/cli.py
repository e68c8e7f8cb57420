"""The ``meshlib bench`` command."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from meshlib._bench.between import run_between
from meshlib._bench.cases import CASES, COLLECTIVES
from meshlib._bench.jobs.job import BenchmarkError
from meshlib._bench.libraries import LIBRARIES, OWN
from meshlib._bench.libraries.environments import python_of
from meshlib._bench.plot import check_can_plot, plot
from meshlib._bench.predict import Network, comparison, cost_of, extrapolation
from meshlib._bench.progress import ProgressBar
from meshlib._bench.report import as_json, copy_bandwidth, header, rows
from meshlib._bench.run import BenchmarkPlan, CaseResult, Skipped, grid, run
from meshlib._bench.sizes import parse_size
from meshlib._command_line import USAGE_ERROR, OneLineParser, print_note
from transport._choosing.tuning import Tuning, from_environment
from transport._hierarchical.cost import Shape

_DEFAULT_SIZES = "8,1K,64K,1M,16M,64M"
_BACKENDS = {"auto": "meshlib", "shm": "meshlib-shm", "tcp": "meshlib-tcp"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement of ``argv``, print a table, and return an exit code."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    measure = run_between if args.between else _measure_here
    try:
        measure(args)
    except ValueError as error:
        print_note("meshlib bench", str(error))
        return USAGE_ERROR
    except BenchmarkError as error:
        print_note("meshlib bench", str(error))
        return 1
    return 0


def _measure_here(args: argparse.Namespace) -> None:
    settings = {key: str(value) for key, value in vars(args).items()}
    tuning = _tuning() if args.predict else None
    if args.plot is not None:
        check_can_plot(args.plot)
    # The model predicts TCP, so its comparison needs measurements over TCP.
    backends = args.backend or (["tcp"] if args.predict else ["auto"])
    own = own_libraries(backends, args.symmetric)
    pythons = dict.fromkeys(own, sys.executable) | _peers_there(args.vs)
    cells = grid(args.collectives, args.sizes, args.ranks, list(pythons))
    plan = BenchmarkPlan(cells, pythons, args.rounds)
    results: list[CaseResult] = []
    sys.stdout.write(header(list(pythons)) + "\n")
    with ProgressBar() as progress:
        for found in run(plan, progress):
            progress.clear()
            if isinstance(found, Skipped):
                sys.stdout.write(f"{found}\n")
            else:
                results += found
                memory = copy_bandwidth(results, found[0].ranks)
                sys.stdout.write(rows(found, list(pythons), memory) + "\n")
            sys.stdout.flush()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(as_json(results, settings))
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(results, args.plot)
        sys.stdout.write(f"{args.plot}: written\n")
    if tuning is not None:
        measured = [result for result in results if result.library == _BACKENDS["tcp"]]
        if measured:
            sys.stdout.write("\n" + comparison(measured, tuning, "tcp") + "\n")
        sys.stdout.write(extrapolation(args.collectives, args.sizes, tuning, _network(args)))


def _peers_there(wanted: Sequence[str]) -> dict[str, str]:
    """Return the interpreters of the installed peers; print a note for each missing one.

    Raises ValueError if none is installed.
    """
    found: dict[str, str] = {}
    missing: list[str] = []
    for peer in wanted:
        try:
            found[peer] = python_of(peer)
        except ValueError as error:
            missing.append(str(error))
    if missing and not found:
        raise ValueError("; ".join(missing))
    for complaint in missing:
        print_note("meshlib bench", f"skipped: {complaint}")
    return found


def _network(args: argparse.Namespace) -> Network:
    shape = Shape(args.hosts, args.ranks_per_host)
    return Network(shape, 1e-6 * args.network_latency, 1e9 * args.network_bandwidth)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="meshlib bench",
        description="Measure collectives on float32 arrays on this machine. Each time is the median"
        " of the slowest rank's; a barrier precedes each call, and libraries alternate.",
    )
    add_cells(parser)
    parser.add_argument(
        "--vs",
        type=partial(chosen, known=_PEERS, what="peer"),
        default=[],
        metavar="NAMES",
        help=f"libraries to compare with: {', '.join(_PEERS)}",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=8, help="rounds per library (default: 8)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the times over the sizes into FILE (.png)"
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="also show the cost model's times, next to measured times and for many hosts",
    )
    parser.add_argument(
        "--between",
        action="store_true",
        help="measure between the hosts of a job, as one of its ranks: meshrun --nnodes N ..."
        " -m meshlib bench --between (ignores --ranks, --json, --plot and --predict)",
    )
    parser.add_argument(
        "--write-network",
        type=Path,
        metavar="FILE",
        help="with --between: write the hosts and the paths between them, for meshlib explain mesh",
    )
    model = parser.add_argument_group("many hosts, with --predict")
    model.add_argument("--hosts", type=_positive, default=1000, metavar="N", help="(1000)")
    model.add_argument("--ranks-per-host", type=_positive, default=8, metavar="N", help="(8)")
    model.add_argument(
        "--network-latency", type=_amount, default=20.0, metavar="US", help="µs per frame (20)"
    )
    model.add_argument(
        "--network-bandwidth",
        type=_amount,
        default=12.5,
        metavar="GB",
        help="GB/s of a host's network card, in each direction (12.5)",
    )
    return parser.parse_args(argv)


def add_cells(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the calls: collectives, sizes, ranks, and meshlib's backends."""
    parser.add_argument(
        "--collectives",
        type=_collectives,
        default=["all_reduce"],
        metavar="NAMES",
        help=f"comma-separated, or all: {', '.join(CASES)} (default: all_reduce)",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes(_DEFAULT_SIZES),
        metavar="SIZES",
        help=f"bytes of each rank's input (default: {_DEFAULT_SIZES})",
    )
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=[2, 4],
        metavar="N,N",
        help="numbers of ranks (default: 2,4)",
    )
    parser.add_argument(
        "--backend",
        type=partial(chosen, known=list(_BACKENDS), what="backend"),
        default=[],
        metavar="NAMES",
        help=f"backends of meshlib's calls: {', '.join(_BACKENDS)} (default: auto, or tcp with"
        " --predict)",
    )
    parser.add_argument(
        "--symmetric",
        action="store_true",
        help="also measure arrays from group.empty(), as library meshlib-symmetric",
    )


def own_libraries(backends: Sequence[str], symmetric: bool) -> list[str]:
    """Return the names of meshlib's variants that ``--backend`` and ``--symmetric`` select."""
    return [_BACKENDS[backend] for backend in backends] + ["meshlib-symmetric"] * symmetric


def _tuning() -> Tuning:
    """Return the tuning in use, which must have the costs of messages."""
    tuning = from_environment()
    for transport in ("tcp", "shm"):
        cost_of(tuning, transport)
    return tuning


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


_PEERS = [name for name in LIBRARIES if name not in OWN]


def chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    """Return the comma-separated names in ``text``; raise ArgumentTypeError for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"{what} {name!r} is unknown; expected {', '.join(known)}"
            )
    return names


def _collectives(text: str) -> list[str]:
    return COLLECTIVES if text == "all" else chosen(text, list(CASES), "collective")


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _ranks(text: str) -> list[int]:
    ranks = [_positive(part) for part in text.split(",")]
    if min(ranks) < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2 ranks, got {text}")
    return ranks
