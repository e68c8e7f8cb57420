"""Results as a text table and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshlib._bench.cases import COPY
from meshlib._bench.libraries import OWN
from meshlib._bench.run import MEMORY_BOUND, CaseResult
from meshlib._bench.sizes import format_size
from transport._platform import available_cores

MPI = ("openmpi", "mpich")
BEST_MPI = "best MPI"


def references(libraries: Iterable[str]) -> list[str]:
    """Return the libraries to compare with: the peers, and ``BEST_MPI`` for both MPIs."""
    peers = [library for library in libraries if library not in OWN]
    return [*peers, BEST_MPI] if all(mpi in peers for mpi in MPI) else peers


def ratio(
    results: Sequence[CaseResult], library: str, reference: str, *, after_last: bool = False
) -> float | None:
    """Return ``library``'s median over ``reference``'s; None if one was not measured.

    With ``after_last`` the times count from the last rank's entry.
    """
    medians = {
        result.library: result.median_after_last if after_last else result.median
        for result in results
    }
    names = MPI if reference == BEST_MPI else (reference,)
    others = [median for name in names if (median := medians.get(name)) is not None]
    own = medians.get(library)
    return None if own is None or not others else own / min(others)


def header(libraries: Sequence[str]) -> str:
    """Return the table's first line."""
    line = f"{'collective':15}{'ranks':>6}{'size':>10}  {'library':18}{'time µs':>11}"
    line += f"{'algbw GB/s':>12}{'busbw GB/s':>12}{'memory':>8}"
    return line + "".join(f"{'/ ' + name:>11}" for name in references(libraries))


def rows(results: Sequence[CaseResult], libraries: Sequence[str], memory: float | None) -> str:
    """Return a line for each library; meshlib's lines also have the ratio to each reference.

    ``memory`` is the copy bandwidth of the ranks in bytes per second, or None.
    """
    first = results[0]
    size = format_size(first.nbytes) if first.nbytes else ""
    start = f"{first.case:15}{first.ranks:>6}{size:>10}"
    lines: list[str] = []
    for result in results:
        line = f"{start}  {result.library:18}{1e6 * result.median:>11,.1f}"
        if first.nbytes:
            line += f"{1e-9 * result.algorithm_bandwidth:>12.3f}"
            line += f"{1e-9 * result.bus_bandwidth:>12.3f}"
            known = memory is not None and result.nbytes >= MEMORY_BOUND
            line += f"{result.moved / memory:>8.0%}" if known and memory else f"{'':8}"
        else:
            line += f"{'':32}"
        for reference in references(libraries) if result.library in OWN else []:
            value = ratio(results, result.library, reference)
            line += f"{'' if value is None else f'{value:.2f}':>11}"
        lines.append(line.rstrip())
        start = " " * len(start)
    return "\n".join(lines)


def copy_bandwidth(results: Iterable[CaseResult], ranks: int) -> float | None:
    """Return the bytes per second that ``ranks`` ranks copied together; None if not measured."""
    found = [result.moved for result in results if (result.case, result.ranks) == (COPY, ranks)]
    return found[-1] if found else None


def as_json(results: Sequence[CaseResult], settings: dict[str, Any]) -> str:
    """Return all results, the settings and the machine's properties."""
    return json.dumps(
        {
            "machine": {
                "processor": processor(),
                "cores": available_cores(),
                "system": platform.platform(),
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
            "settings": settings,
            "results": [_result_as_json(result) for result in results],
        },
        indent=1,
    )


def _result_as_json(result: CaseResult) -> dict[str, Any]:
    after_last = result.median_after_last
    return {
        "case": result.case,
        "bytes": result.nbytes,
        "ranks": result.ranks,
        "library": result.library,
        "version": result.version,
        "rounds": len(result.rounds),
        "repetitions": len(result.seconds),
        "median_us": round(1e6 * result.median, 3),
        "after_last_us": None if after_last is None else round(1e6 * after_last, 3),
        "tenth_us": round(1e6 * result.quantile(1), 3),
        "ninth_tenth_us": round(1e6 * result.quantile(9), 3),
        "algorithm_bandwidth_gb_s": round(1e-9 * result.algorithm_bandwidth, 6),
        "bus_bandwidth_gb_s": round(1e-9 * result.bus_bandwidth, 6),
        "moved_gb_s": round(1e-9 * result.moved, 6),
    }


def processor() -> str:
    """Return the processor's name from Linux's /proc/cpuinfo, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
