"""``meshlib trace DIR``: a sentence about the cause of a failure, and files with details."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from meshlib._command_line import OneLineParser, print_result
from meshlib._trace import HOW_TO_KEEP
from meshlib._trace.chains import describe
from meshlib._trace.dump import find, read
from meshlib._trace.merge import verdict
from meshlib._trace.pictures import page, trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status (2 for a directory without records)."""
    parser = OneLineParser(
        prog="meshlib trace",
        description="Merge the flight records of a job's ranks: print the cause of a failure, and "
        "write a timeline (HTML) and a trace for Perfetto (JSON).",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="the directory of meshrun --log-dir, in which the newest run counts; or that of"
        " meshrun --trace-dir or MESHLIB_TRACE_DIR, with rank0.json, rank1.json, …",
    )
    parser.add_argument(
        "-o", "--output", help="the directory to write to (default: that of the records)"
    )
    if not (sys.argv[1:] if argv is None else argv):
        parser.error(f"DIR is missing: {HOW_TO_KEEP}")
    options = parser.parse_args(argv)

    def make() -> str:
        records = find(options.directory)
        dumps = read(records)
        target = Path(options.output or records)
        target.mkdir(parents=True, exist_ok=True)
        html, perfetto = target / "timeline.html", target / "trace.json"
        html.write_text(page(dumps), encoding="utf-8")
        perfetto.write_text(json.dumps(trace(dumps)), encoding="utf-8")
        found = "" if records == Path(options.directory) else f"records: {records}\n"
        calls = describe(dumps)
        text = f"{verdict(dumps)}\n{calls}\n" if calls else f"{verdict(dumps)}\n"
        return f"{found}{text}timeline: {html}\ntrace for ui.perfetto.dev: {perfetto}\n"

    return print_result(parser.prog, make)
