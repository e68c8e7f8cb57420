"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshlib.bench.run import Result
from meshlib.bench.sizes import format_size

OWN = "meshlib"


def header(libraries: Sequence[str]) -> str:
    """Return the table's first line."""
    columns = [f"{library} µs" for library in libraries]
    columns += [f"/ {library}" for library in libraries if library != OWN]
    return f"{'collective':15}{'ranks':>6}{'size':>10}" + "".join(f"{c:>13}" for c in columns)


def row(results: Sequence[Result]) -> str:
    """Return one line: the medians, and our time over each other library's."""
    first = results[0]
    line = f"{first.case:15}{first.ranks:>6}{format_size(first.nbytes):>10}"
    line += "".join(f"{1e6 * result.median:>13,.1f}" for result in results)
    own = next((result for result in results if result.library == OWN), None)
    for result in results:
        if own is not None and result is not own:
            line += f"{own.median / result.median:>13.2f}"
    return line


def as_json(results: Sequence[Result], settings: dict[str, Any]) -> str:
    """Return all results, how they were made, and on what machine."""
    return json.dumps(
        {
            "machine": {
                "processor": processor(),
                "cores": len(os.sched_getaffinity(0)),
                "system": platform.platform(),
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
            "settings": settings,
            "results": [_result_as_json(result) for result in results],
        },
        indent=1,
    )


def _result_as_json(result: Result) -> dict[str, Any]:
    return {
        "case": result.case,
        "bytes": result.nbytes,
        "ranks": result.ranks,
        "library": result.library,
        "version": result.version,
        "right": result.right,
        "repetitions": len(result.seconds),
        "median_us": round(1e6 * result.median, 3),
        "tenth_us": round(1e6 * result.quantile(1), 3),
        "ninth_tenth_us": round(1e6 * result.quantile(9), 3),
    }


def processor() -> str:
    """Return the processor's name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
