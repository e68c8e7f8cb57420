"""The costs of a call besides time: copied bytes, and system calls.

python -m tests.benchmarks.counts [--collectives all] [--sizes 1M] [--json out/counts.json]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshlib._bench.cases import CASES, COPY
from meshlib._bench.cli import add_cells, own_libraries
from meshlib._bench.jobs.job import LibraryJob, running_job
from meshlib._bench.libraries import OWN
from meshlib._bench.run import Cell, grid
from meshlib._bench.sizes import format_size
from meshlib._command_line import OneLineParser
from tests.benchmarks.counters import counting
from tests.benchmarks.counters.system_calls import CannotCountError, system_calls

_FEW, _MANY = 2, 10
_FEW_SMALL, _MANY_SMALL = 10, 60
_TURNS = 3
_LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Count:
    """Per call, all ranks together. System calls and switches: None if they cannot be counted.

    ``copied``, ``reduced`` and ``sockets`` are bytes: written by copies, written by reductions, and
    given to or taken from sockets. ``switches`` are of context.
    """

    case: str
    nbytes: int
    ranks: int
    library: str
    copied: float
    reduced: float
    sockets: float
    system_calls: float | None
    switches: float | None


def count(cells: Sequence[Cell]) -> Iterator[Count | CannotCountError]:
    """Yield what each cell costs in each of our libraries; first why something is not counted."""
    reported = False
    for ranks in dict.fromkeys(cell.ranks for cell in cells):
        mine = [cell for cell in cells if cell.ranks == ranks and cell.case != COPY]
        for library in dict.fromkeys(name for cell in mine for name in cell.libraries):
            if library not in OWN:
                continue
            with (
                running_job(library, sys.executable, ranks) as plain,
                running_job(library, sys.executable, ranks, counting.__file__) as rewritten,
            ):
                plain.start()
                rewritten.start()
                for cell in mine:
                    calls = _calls(plain, cell)
                    if isinstance(calls, CannotCountError):
                        if not reported:
                            yield calls
                        reported, calls = True, (None, None)
                    moved = _moved(rewritten, cell)
                    yield Count(cell.case, cell.nbytes, ranks, library, *moved, *calls)


def _calls(job: LibraryJob, cell: Cell) -> tuple[float, float] | CannotCountError:
    """Return system calls and switches: of many calls less those of few, so that fixed ones go.

    Each is the least of some turns: what else goes on only adds.
    """
    repetitions = _repetitions(cell)
    found: dict[int, list[tuple[int, int]]] = {times: [] for times in repetitions}
    job.measure(cell.case, cell.nbytes, min(repetitions), 0, synchronised=False)
    with tempfile.TemporaryDirectory(prefix="meshlib-bench-") as folder:
        for times in repetitions * _TURNS:
            try:
                with system_calls(job.processes.pids, Path(folder)) as counts:
                    job.measure(cell.case, cell.nbytes, times, 0, synchronised=False)
            except CannotCountError as error:
                return error
            found[times].append((counts.calls, counts.switches))
    few, many = repetitions
    least = [[min(turns) for turns in zip(*found[times], strict=True)] for times in (few, many)]
    calls, switches = (max(0.0, (b - a) / (many - few)) for a, b in zip(*least, strict=True))
    return calls, switches


def _moved(job: LibraryJob, cell: Cell) -> tuple[float, float, float]:
    """Return bytes copied, reduced, and through sockets."""
    few, many = _repetitions(cell)
    totals = [
        job.measure(cell.case, cell.nbytes, repetitions, 0, synchronised=False).counted
        for repetitions in (few, many)
    ]
    copied, reduced, sockets = (
        (totals[1][name] - totals[0][name]) / many for name in ("copied", "reduced", "sockets")
    )
    return copied, reduced, sockets


def _repetitions(cell: Cell) -> tuple[int, int]:
    return (_FEW, _MANY) if cell.nbytes >= _LARGE else (_FEW_SMALL, _MANY_SMALL)


def header() -> str:
    """Return the table's first lines."""
    line = f"{'collective':15}{'ranks':>6}{'size':>10}  {'library':18}{'copied':>14}{'reduced':>14}"
    line += f"{'sockets':>14}{'/ least':>9}{'system calls':>14}{'switches':>10}"
    return "Bytes and system calls of one call, all ranks together\n" + line


def row(found: Count) -> str:
    """Return one line; "/ least" is all these bytes over those of the results."""
    size = format_size(found.nbytes) if found.nbytes else ""
    line = f"{found.case:15}{found.ranks:>6}{size:>10}  {found.library:18}"
    line += f"{found.copied:>14,.0f}{found.reduced:>14,.0f}{found.sockets:>14,.0f}"
    least = CASES[found.case].written(found.nbytes, found.ranks)
    line += (
        f"{(found.copied + found.reduced + found.sockets) / least:>9.2f}" if least else f"{'':9}"
    )
    for number, width in ((found.system_calls, 14), (found.switches, 10)):
        line += f"{'–':>{width}}" if number is None else f"{number:>{width}.1f}"
    return line


def as_records(counts: Iterable[Count]) -> list[dict[str, object]]:
    """Return the counts for JSON."""
    return [{name: getattr(found, name) for name in Count.__dataclass_fields__} for found in counts]


def main(argv: Sequence[str] | None = None) -> int:
    """Count what ``argv`` says, print a table, and return an exit code."""
    parser = OneLineParser(
        prog="python -m tests.benchmarks.counts",
        description="Count, untimed, the bytes that our calls copy and their system calls.",
    )
    add_cells(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    args = parser.parse_args(argv)
    libraries = own_libraries(args.backend or ["tcp"], args.symmetric)
    counts: list[Count] = []
    sys.stdout.write(f"{header()}\n")
    for found in count(grid(args.collectives, args.sizes, args.ranks, libraries)):
        if isinstance(found, CannotCountError):
            sys.stdout.write(f"no system calls: {found}\n")
        else:
            sys.stdout.write(f"{row(found)}\n")
            counts.append(found)
        sys.stdout.flush()
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(as_records(counts), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
