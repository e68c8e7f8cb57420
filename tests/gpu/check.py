"""``check.py FOLDER``: all that needs a GPU, in one command of less than ten minutes.

Tests, then benchmarks, then ``FOLDER/gpu-report.md``, which says what ran, on what, with which
outcome. The report is written after each part, so that it is there if the next one is cut off.
Exit status 1 when a test failed, a benchmark did not run, or an aim was missed.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

HERE = Path(__file__).parent
TESTS_SECONDS = 400
BENCH_SECONDS = 150
_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "nccl4py", "jax", "numpy", "ml_dtypes")


def machine() -> list[str]:
    """What it ran on: lines of a table."""
    cupy = import_module("cupy")
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(0)["name"]
    rows = [
        (
            "GPU",
            f"{runtime.getDeviceCount()} × {name.decode() if isinstance(name, bytes) else name}",
        ),
        ("driver, CUDA", f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}"),
        ("Python", platform.python_version()),
    ]
    for package in _PACKAGES:
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    try:
        from transport.nccl.library import load_nccl, version_text

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
    # With the project's own -q this is one line for each test.
    command = [sys.executable, "-m", "pytest", "-vv", "-rs", "--color=no", str(HERE)]
    ended = ""
    with log.open("w") as out:
        try:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, timeout=TESTS_SECONDS, check=False
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status, ended = 1, f"The tests were ended after {TESTS_SECONDS} s."
    said = log.read_text()
    print(said[-8000:])
    outcomes = re.findall(r"(?m)^\S+::(test_\S+) (PASSED|FAILED|ERROR|SKIPPED)", said)
    if not any(outcome == "PASSED" for _, outcome in outcomes):
        status, ended = 1, f"{ended} No test passed."
    reasons = re.findall(r"(?m)^SKIPPED .*?: (.*)$", said)
    lines = [ended, ""] if ended else []
    lines += ["| test | outcome |", "|---|---|"]
    lines += [f"| `{name}` | {outcome.lower()} |" for name, outcome in outcomes]
    lines += ["", *(f"- skipped: {reason}" for reason in dict.fromkeys(reasons))]
    lines += ["", "What failed, and why, is in `gpu-tests.log`."] if status else []
    return status == 0, lines


def benchmarks() -> tuple[bool, list[str]]:
    """Run the benchmarks; return whether the aims were met, and lines for the report."""
    try:
        done = subprocess.run(
            [sys.executable, str(HERE / "bench.py")],
            stdout=subprocess.PIPE,
            text=True,
            timeout=BENCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, [f"The benchmarks were ended after {BENCH_SECONDS} s."]
    return done.returncode == 0, done.stdout.splitlines()


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "gpu-report.md"
    today = datetime.datetime.now(tz=datetime.UTC)
    parts = [f"# GPU check of {today:%Y-%m-%d %H:%M} UTC", "", *machine()]

    def write(*lines: str) -> None:
        parts.extend(lines)
        report.write_text("\n".join(parts) + "\n")

    write()
    good, lines = tests(folder)
    write("", "## Tests", "", *lines)
    met, lines = benchmarks()
    write("", "## Benchmarks", "", *lines)
    print(report.read_text())
    return 0 if good and met else 1


if __name__ == "__main__":
    sys.exit(main())
