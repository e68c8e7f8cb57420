"""The targets of this library beside its peers, measured in one interleaved run.

    python -m tests.benchmarks.targets [--out out/targets.md] [--ranks 2,4,8] [--rows 1,3]

A row of the table is an aim: a case, sizes, and a bound for the ratio of medians. Every cell is
measured once, in all libraries that some row asks of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshlib._bench.cases import COLLECTIVES
from meshlib._bench.jobs.job import BenchmarkError
from meshlib._bench.libraries.environments import is_set_up, python_of
from meshlib._bench.progress import ProgressBar
from meshlib._bench.report import BEST_MPI, MPI, as_json, copy_bandwidth, processor, ratio
from meshlib._bench.run import BenchmarkPlan, CaseResult, Cell, Skipped, copy_cell, run
from meshlib._bench.sizes import format_size, parse_size
from meshlib._command_line import OneLineParser

MEMORY = "memory"
"""The reference of an aim that is a share of the bandwidth with which all ranks copy."""

_PRIVATE, _SYMMETRIC, _TCP = "meshlib", "meshlib-symmetric", "meshlib-tcp"
_ANY = (2, 4, 8)
_CELL_SECONDS = 10.0  # seconds a cell
_MOVERS = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "ping_pong")


@dataclass(frozen=True, slots=True)
class Aim:
    """``library``'s time over ``reference``'s is to be at most ``bound``, in each of the cells.

    With MEMORY as the reference: bytes moved a second over the copy bandwidth, at least ``bound``.
    """

    row: int
    title: str
    library: str
    reference: str
    bound: float
    cases: tuple[str, ...]
    sizes: tuple[str, ...]
    ranks: tuple[int, ...] = _ANY

    def cells(self) -> list[tuple[int, str, int]]:
        """Return the ranks, case and bytes of each cell."""
        return [
            (count, case, parse_size(size) if case != "barrier" else 0)
            for count in self.ranks
            for case in self.cases
            for size in (self.sizes if case != "barrier" else self.sizes[:1])
        ]

    def libraries(self) -> tuple[str, ...]:
        """Return what has to be measured."""
        others = {BEST_MPI: MPI, MEMORY: ()}.get(self.reference, (self.reference,))
        return (self.library, *others)


_REDUCE = ("all_reduce",)
_SIZED = tuple(name for name in COLLECTIVES if name != "barrier")

AIMS = [
    Aim(1, "all_reduce, private", _PRIVATE, BEST_MPI, 1.0, _REDUCE, ("64K",)),
    Aim(1, "all_reduce, private", _PRIVATE, BEST_MPI, 0.75, _REDUCE, ("1M", "4M", "16M", "64M")),
    Aim(2, "all_reduce, symmetric", _SYMMETRIC, BEST_MPI, 0.4, _REDUCE, ("1M", "4M", "16M", "64M")),
    Aim(3, "all_reduce, small", _PRIVATE, "openmpi", 3.0, _REDUCE, ("8", "1K", "4K"), (2,)),
    Aim(3, "all_reduce, small", _PRIVATE, "gloo", 0.05, _REDUCE, ("8", "1K", "4K"), (2,)),
    Aim(4, "all_reduce, small", _PRIVATE, BEST_MPI, 1.0, _REDUCE, ("8",), (4, 8)),
    Aim(5, "others, private", _PRIVATE, BEST_MPI, 1.0, _MOVERS, ("1M", "64M")),
    Aim(6, "TCP only", _TCP, "gloo", 0.3, tuple(COLLECTIVES), ("8", "64K")),
    Aim(6, "TCP only", _TCP, "gloo", 0.7, _SIZED, ("1M",)),
    Aim(6, "TCP only", _TCP, "gloo", 1.0, _SIZED, ("64M",)),
    Aim(7, "all_reduce, symmetric", _SYMMETRIC, MEMORY, 0.7, _REDUCE, ("64M",)),
]


def plan_cells(aims: Sequence[Aim], ranks: Sequence[int], installed: Sequence[str]) -> list[Cell]:
    """Return what has to be measured for ``aims``, each cell once, in what is ``installed``."""
    wanted: dict[tuple[int, str, int], set[str]] = {}
    for aim in aims:
        for key in aim.cells():
            wanted.setdefault(key, set()).update(aim.libraries())
    cells: list[Cell] = []
    for count in ranks:
        for (size, case, nbytes), libraries in wanted.items():
            if size != count:
                continue
            # Memory is measured right before what is set against it.
            if any((size, case, nbytes) in a.cells() for a in aims if a.reference == MEMORY):
                cells.append(copy_cell(count, _PRIVATE))
            able = tuple(name for name in installed if name in libraries)
            cells.append(Cell(case, nbytes, count, able))
    return cells


def table(aims: Sequence[Aim], ranks: Sequence[int], results: Sequence[CaseResult]) -> str:
    """Return a Markdown table: a line for each cell of each aim."""
    lines = [
        "| row | what | ranks | size | ours µs | against | µs | ratio | aim | | after last |",
        "|---:|---|---:|---:|---:|---|---:|---:|---:|---|---:|",
    ]
    lines += [
        _line(aim, count, case, nbytes, results)
        for aim in aims
        for count, case, nbytes in aim.cells()
        if count in ranks
    ]
    return "\n".join(lines) + "\n"


def _line(aim: Aim, ranks: int, case: str, nbytes: int, results: Sequence[CaseResult]) -> str:
    cell = [it for it in results if (it.ranks, it.case, it.nbytes) == (ranks, case, nbytes)]
    medians = {result.library: result.median for result in cell}
    title = (
        aim.title if aim.cases == _REDUCE else f"{case}, {aim.title.partition(', ')[2] or 'TCP'}"
    )
    size = format_size(nbytes) if nbytes else "–"
    start = f"| {aim.row} | {title} | {ranks} | {size} |"
    reached, other, against = _reached(aim, cell, copy_bandwidth(results, ranks))
    sign = "≥" if aim.reference == MEMORY else "≤"
    if reached is None or aim.library not in medians:
        return f"{start} – | {against} | – | – | {sign} {aim.bound:g} | not measured | – |"
    after = ratio(cell, aim.library, aim.reference, after_last=True)
    met = reached >= aim.bound if aim.reference == MEMORY else reached <= aim.bound
    return (
        f"{start} {1e6 * medians[aim.library]:,.1f} | {against} | {other} | {reached:.2f} |"
        f" {sign} {aim.bound:g} | {'reached' if met else '**not reached**'} |"
        f" {'–' if after is None else f'{after:.2f}'} |"
    )


def _reached(
    aim: Aim, cell: Sequence[CaseResult], bandwidth: float | None
) -> tuple[float | None, str, str]:
    """Return the ratio, the reference's figure and its name."""
    if aim.reference == MEMORY:
        own = next((result for result in cell if result.library == aim.library), None)
        if own is None or bandwidth is None:
            return None, "", "copying"
        return own.moved / bandwidth, f"{1e-9 * bandwidth:.1f} GB/s", "copying"
    found = ratio(cell, aim.library, aim.reference)
    others = [result for result in cell if result.library in aim.libraries()[1:]]
    if found is None or not others:
        return None, "", aim.reference
    best = min(others, key=lambda result: result.median)
    return found, f"{1e6 * best.median:,.1f}", best.library


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the table, and return an exit code; an aim that is missed is not an error."""
    args = _parse(argv)
    aims = [aim for aim in AIMS if not args.rows or aim.row in args.rows]
    peers = [peer for peer in ("gloo", *MPI) if is_set_up(peer)]
    pythons = dict.fromkeys((_PRIVATE, _SYMMETRIC, _TCP), sys.executable)
    pythons |= {peer: python_of(peer) for peer in peers}
    cells = plan_cells(aims, args.ranks, list(pythons))
    plan = BenchmarkPlan(cells, pythons, args.rounds, args.turn, _CELL_SECONDS)
    results: list[CaseResult] = []
    began, load = time.monotonic(), os.getloadavg()[0]
    try:
        with ProgressBar() as progress:
            for found in run(plan, progress):
                progress.clear()
                if isinstance(found, Skipped):
                    sys.stderr.write(f"{found}\n")
                else:
                    results += found
    except BenchmarkError as error:
        sys.stderr.write(f"tests.benchmarks.targets: {error}\n")
        return 1
    versions = sorted({result.version for result in results})
    page = (
        f"{processor()}, {len(os.sched_getaffinity(0))} cores; load {load:.1f} before the run;"
        f" {time.monotonic() - began:.0f} s, {args.rounds} rounds; {'; '.join(versions)}.\n\n"
        + table(aims, args.ranks, results)
    )
    sys.stdout.write(page)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page, encoding="utf-8")
        settings = {key: str(value) for key, value in vars(args).items()}
        args.out.with_suffix(".json").write_text(as_json(results, settings), encoding="utf-8")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m tests.benchmarks.targets",
        description="Measure what this library is to reach beside Gloo, Open MPI and MPICH, and"
        " print a Markdown table.",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write it to FILE (and .json)"
    )
    parser.add_argument("--ranks", type=_numbers, default=list(_ANY), metavar="N,N", help="(2,4,8)")
    parser.add_argument("--rows", type=_numbers, default=[], metavar="N,N", help="(all)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(5)")
    parser.add_argument("--turn", type=float, default=0.05, metavar="S", help="seconds (0.05)")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.ranks) - set(_ANY)):
        parser.error(f"--ranks: {unknown} are not among {list(_ANY)}")
    if unknown := sorted(set(args.rows) - {aim.row for aim in AIMS}):
        parser.error(f"--rows: {unknown} are not among {sorted({aim.row for aim in AIMS})}")
    return args


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
