"""The ``meshlib tune`` command."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from meshlib._bench.cli import chosen
from meshlib._bench.predict import in_words
from meshlib._bench.report import processor
from meshlib._bench.sizes import format_size
from meshlib._command_line import OneLineParser, print_note
from meshlib._launcher.spawn import spawn
from meshlib._tune.contests import CONTESTS
from meshlib._tune.measure import TRANSPORTS, TuningResults, measure, run
from meshlib.testing import run_ranks
from transport import _environment as environment
from transport._choosing.choice import DEFAULT, Thresholds
from transport._choosing.tuning import TransportTuning, Tuning
from transport._errors import DistError
from transport._platform import available_cores

_SECONDS = 600.0
_DEFAULT_FILE = "meshlib-tuning.json"
Measure = Callable[[str, int], TuningResults]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurement of ``argv``, write the table, and return an exit code."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    try:
        with args.output.open("a"):  # fail now if the file cannot be written
            pass
        tuning = tune(args.transports, args.ranks, _measure, _progress)
        args.output.write_text(tuning.encode() + "\n", encoding="utf-8")
    except (OSError, DistError) as error:
        print_note("meshlib tune", str(error))
        return 1
    sys.stdout.write(describe(tuning))
    sys.stdout.write(f"\nwritten to {args.output}; to use it: {environment.TUNING}={args.output}\n")
    return 0


def tune(
    transports: Sequence[str],
    ranks: Sequence[int],
    measure: Measure,
    progress: Callable[[str], None],
) -> Tuning:
    """Return the results of ``measure(transport, ranks)`` for all transports and numbers of ranks.

    The cost is that of the fewest ranks, which do not compete for processors.
    """
    found: dict[str, TransportTuning] = {}
    for transport in transports:
        results: list[tuple[int, TuningResults]] = []
        for size in sorted(ranks):
            progress(f"{transport}, {size} ranks")
            results.append((size, measure(transport, size)))
        tables = tuple((size, result.thresholds) for size, result in results)
        found[transport] = TransportTuning(
            results[0][1].cost, tables if transport in CONTESTS else ()
        )
    progress("")
    return Tuning(_source(), found)


def describe(tuning: Tuning) -> str:
    """Return the tuning table as text for the terminal."""
    lines = [tuning.source, ""]
    for name, entry in tuning.transports.items():
        lines.append(name + (f": {in_words(entry.cost)}" if entry.cost else ""))
        for contest in CONTESTS.get(name, ()):
            if any(ranks >= contest.least_ranks for ranks, _ in entry.thresholds):
                lines.append(f"  {contest.field:26}" + _row(entry, contest.field))
        for field in ("segment", "pairwise_ranks"):
            if any(
                getattr(table, field) != getattr(DEFAULT, field) for _, table in entry.thresholds
            ):
                lines.append(f"  {field:26}" + _row(entry, field))
    return "\n".join(lines) + "\n"


def _row(entry: TransportTuning, field: str) -> str:
    def shown(table: Thresholds) -> str:
        value = getattr(table, field)
        return str(value) if field.endswith("ranks") else format_size(value)

    return "".join(f"{shown(table):>12} ({ranks} ranks)" for ranks, table in entry.thresholds)


def _measure(transport: str, size: int) -> TuningResults:
    if transport == "inproc":
        return run_ranks(measure, size, transport, timeout=_SECONDS)[0]
    with tempfile.TemporaryDirectory(prefix="meshlib-tune-") as folder:
        path = Path(folder) / "found.json"
        spawn(run, args=(transport, str(path)), nprocs=size)
        return TuningResults.unpack(path.read_text(encoding="utf-8"))


def _source() -> str:
    cores = available_cores()
    return (
        f"meshlib tune, {datetime.now(UTC):%Y-%m-%d}: {processor()}, {cores} cores,"
        f" {platform.system()} {platform.release()}, Python {platform.python_version()},"
        f" NumPy {np.__version__}"
    )


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="meshlib tune",
        description="Measure on this machine the sizes at which another algorithm becomes faster,"
        " and the cost of a message. Takes some minutes; nothing else should run meanwhile.",
    )
    parser.add_argument(
        "output",
        type=Path,
        nargs="?",
        default=Path(_DEFAULT_FILE),
        help=f"the file to write (default: {_DEFAULT_FILE})",
    )
    parser.add_argument(
        "--transports",
        type=partial(chosen, known=TRANSPORTS, what="transport"),
        default=["tcp", "shm", "hierarchical"],
        metavar="NAMES",
        help=f"comma-separated: {', '.join(TRANSPORTS)} (default: tcp,shm,hierarchical)",
    )
    parser.add_argument(
        "--ranks",
        type=_ranks,
        default=[2, 4, 8],
        metavar="N,N",
        help="numbers of ranks (default: 2,4,8)",
    )
    return parser.parse_args(argv)


def _ranks(text: str) -> list[int]:
    ranks = [int(part) for part in text.split(",")]
    if any(size < 2 or size % 2 for size in ranks):
        raise argparse.ArgumentTypeError(f"expected even numbers from 2 on, got {text}")
    return ranks
