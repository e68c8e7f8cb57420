"""``check.py FOLDER``: all that needs a GPU, in one command of less than ten minutes.

Tests, then benchmarks, then ``FOLDER/gpu-report.md``, which says what ran, on what, with which
outcome. The report is written after each part, so that it is there if the next one is cut off;
what was said in full is in files beside it. Nothing is written anywhere else but CuPy's cache of
kernels. Exit status 1 when a test failed, a benchmark did not run, or an aim was missed.
"""

from __future__ import annotations

import datetime
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path

from tests.support.gpu import ended

HERE = Path(__file__).parent

TESTS_SECONDS = 400
BENCH_SECONDS = 140
_PACKAGES = (
    *("cupy-cuda12x", "cupy-cuda13x", "nccl4py", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    *("jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy", "ml_dtypes"),
)


def machine() -> list[str]:
    """The machine it ran on: lines of a table."""
    cupy = import_module("cupy")
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(0)["name"]
    count = runtime.getDeviceCount()
    rows = [
        ("GPU", f"{count} × {name.decode() if isinstance(name, bytes) else name}"),
        (
            "driver's CUDA, CuPy's CUDA",
            f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}",
        ),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
    ]
    for package in _PACKAGES:
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    try:
        from transport._nccl.library import load_nccl, version_text

        library = load_nccl()
        rows.append(("NCCL", f"{version_text(library.version())} by {library.name}"))
    except Exception as error:  # noqa: BLE001 (it belongs into the report)
        rows.append(("NCCL", str(error)))
    return ["| what | version |", "|---|---|", *(f"| {what} | {text} |" for what, text in rows)]


def tests(folder: Path) -> tuple[bool, list[str]]:
    """Run the tests; return whether all passed, and lines for the report.

    What they say goes to ``gpu-tests.log``, and is read from there, however far they came.
    """
    log = folder / "gpu-tests.log"
    # With the project's own -q this is one line for each test. Other people's warnings are not
    # failures of ours, and the project's folder may be one that nothing can be written to.
    options = ["-vv", "-rs", "--color=no", "-W", "default", "-p", "no:cacheprovider"]
    env = {**ended.environment(), "MESHLIB_GPU_SECONDS": str(TESTS_SECONDS - 20)}
    command = [sys.executable, "-m", "pytest", *options, str(HERE)]
    status = ended.run(command, TESTS_SECONDS, log, env, whole_group=True)
    notes: list[str] = []
    if status == ended.TIMED_OUT:
        notes.append(f"The tests were ended after {TESTS_SECONDS} s.")
    said = log.read_text(errors="replace")
    print(said[-8000:], flush=True)
    outcomes = re.findall(r"(?m)^\S+::(test_\S+) (PASSED|FAILED|ERROR|SKIPPED)", said)
    if not any(outcome == "PASSED" for _, outcome in outcomes):
        status = status or 1
        notes.append("No test passed.")
    reasons = re.findall(r"(?m)^SKIPPED .*?: (.*)$", said)
    lines = [*notes, ""] if notes else []
    lines += ["| test | outcome |", "|---|---|"]
    lines += [f"| `{name}` | {outcome.lower()} |" for name, outcome in outcomes]
    lines += ["", *(f"- skipped: {reason}" for reason in dict.fromkeys(reasons))]
    lines += ["", "What failed, and why, is in `gpu-tests.log`."] if status else []
    return status == 0, lines


def benchmarks(folder: Path) -> tuple[bool, list[str]]:
    """Run the benchmarks; return whether the aims were met, and lines for the report."""
    table, log = folder / "gpu-bench.md", folder / "gpu-bench.log"
    command = [sys.executable, str(HERE / "bench.py"), "--table", str(table)]
    status = ended.run(command, BENCH_SECONDS, log, whole_group=True)
    lines = table.read_text().splitlines() if table.exists() else ["Nothing was measured."]
    if status == ended.TIMED_OUT:
        lines += ["", f"The benchmarks were ended after {BENCH_SECONDS} s."]
    if status:
        lines += ["", "What failed, and why, is in `gpu-bench.log`."]
    return status == 0, lines


class Report:
    """``gpu-report.md`` in a folder, written again with each part."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "gpu-report.md"
        self._lines: list[str] = []

    def add(self, title: str, part: Callable[[], tuple[bool, list[str]]]) -> bool:
        """Add what ``part`` gives, or its error; return whether it was well."""
        started = time.monotonic()
        try:
            good, lines = part()
        except Exception:  # noqa: BLE001 (whatever it is, it is what the report is for)
            good, lines = False, ["```", *traceback.format_exc().splitlines(), "```"]
        took = f"({time.monotonic() - started:.0f} s)"
        self._lines += [title, "", *lines, "", took, ""]
        self._file.write_text("\n".join(self._lines))
        return good

    def print(self) -> None:
        print(self._file.read_text(), flush=True)


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(f"{sys.argv[0]}: expected one argument, the folder for the report")
    sys.path.insert(0, str(ended.ROOT))
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder)
    now = datetime.datetime.now(tz=datetime.UTC)
    good = [
        report.add(f"# GPU check of {now:%Y-%m-%d %H:%M} UTC", lambda: (True, machine())),
        report.add("## Tests", lambda: tests(folder)),
        report.add("## Benchmarks", lambda: benchmarks(folder)),
    ]
    report.print()
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
