"""``meshlib trace DIR``: what went wrong, in a sentence, and the files to look at."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshlib.trace.dump import read
from meshlib.trace.merge import verdict
from meshlib.trace.perfetto import trace
from meshlib.trace.timeline import page


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status (2 for a directory without records)."""
    parser = argparse.ArgumentParser(
        prog="meshlib trace",
        description="Merge the flight records of a job's ranks: say what went wrong, and write a "
        "timeline (HTML) and a trace for Perfetto (JSON).",
    )
    parser.add_argument("directory", help="where the ranks wrote rank0.json, rank1.json, …")
    parser.add_argument("-o", "--output", help="where to write (default: the same directory)")
    options = parser.parse_args(argv)
    try:
        dumps = read(options.directory)
        target = Path(options.output or options.directory)
        target.mkdir(parents=True, exist_ok=True)
        html, perfetto = target / "timeline.html", target / "trace.json"
        html.write_text(page(dumps), encoding="utf-8")
        perfetto.write_text(json.dumps(trace(dumps)), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"meshlib trace: {error}", file=sys.stderr)
        return 2
    print(verdict(dumps))
    print(f"timeline: {html}")
    print(f"trace for ui.perfetto.dev: {perfetto}")
    return 0
