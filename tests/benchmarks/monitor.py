"""The cost of monitoring a job for its ranks: ``python -m tests.benchmarks.monitor [--ranks N]``.

One job of ``meshrun``, whose steps are fixed work, is watched and not watched by turns, with a page
whose values and metrics somebody asks for once a second. Compared is processor time, which depends
less on what else the machine does: of the ranks' main threads for a step, and of their other
threads for a second. The first second of each turn does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from meshlib._command_line import USAGE_ERROR
from meshlib._monitor.jobs import RunningJob, running
from meshlib._monitor.server import PageServer
from meshlib._monitor.view import JobView
from meshlib._monitor.watch import JobWatch

_PROGRAM = Path(__file__).parent / "programs" / "watched.py"
Turn = tuple[float, float, bool]
"""From when to when (monotonic seconds), and whether the job was watched."""


def main() -> int:
    """Print what each turn took, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--calls", type=int, default=20, help="a step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshlib._launcher", "--start", "exec"),
                *("-n", str(options.ranks), str(_PROGRAM), str(options.calls), name),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            turns = _take_turns(process, options.turns, options.seconds)
        finally:
            Path(name, "end").touch()
            process.wait(60)
        files = [Path(name, str(rank)).read_text().splitlines() for rank in range(options.ranks)]
    if not turns:
        return USAGE_ERROR
    steps = [[tuple(map(float, line.split())) for line in lines] for lines in files]
    _report(turns, steps)
    return 0


def _take_turns(process: subprocess.Popen[bytes], count: int, seconds: float) -> list[Turn]:
    job = None
    while job is None and process.poll() is None:
        time.sleep(0.1)
        job = next((one for one in running() if one.pid == process.pid), None)
    turns: list[Turn] = []
    if job is not None:
        time.sleep(3.0)  # the ranks begin
        for i in range(count):
            begin = time.monotonic()
            if i % 2:
                _look(job, seconds)
            else:
                time.sleep(seconds)
            turns.append((begin + 1.0, time.monotonic() - 0.2, bool(i % 2)))
    return turns


def _look(job: RunningJob, seconds: float) -> None:
    """Watch the job, and ask for what the page and Prometheus ask for, once a second."""
    watch = JobWatch(job.connect(), JobView(job.name, job.ranks))
    page = PageServer(watch)
    url, _, token = page.url.partition("#")
    end = time.monotonic() + seconds
    try:
        watch.start()
        while time.monotonic() < end:
            for path in ("job", "metrics"):
                request = urllib.request.Request(url + path)
                request.add_header("Authorization", f"Bearer {token}")
                with urllib.request.urlopen(request, timeout=10) as answer:
                    answer.read()
            time.sleep(1.0)
    finally:
        page.close()
        watch.close()


def _report(turns: list[Turn], ranks: list[list[tuple[float, ...]]]) -> None:
    mains: dict[bool, list[float]] = {False: [], True: []}
    others: dict[bool, list[float]] = {False: [], True: []}
    for begin, end, watched in turns:
        main = other = clock = 0.0
        for steps in ranks:
            inside = [step for step in steps if begin <= step[0] <= end]
            if len(inside) < 2:
                continue
            (t0, m0, p0), (t1, m1, p1) = inside[0], inside[-1]
            main += (m1 - m0) / (len(inside) - 1) / len(ranks)
            other += ((p1 - p0) - (m1 - m0)) / (t1 - t0) / len(ranks)
            clock = (t1 - t0) / (len(inside) - 1)
        mains[watched].append(main)
        others[watched].append(other)
        print(
            f"{'watched' if watched else 'plain  '}: main thread {main * 1e3:.3f} ms a step of"
            f" {clock * 1e3:.0f} ms, other threads {other * 1e3:.2f} ms a second"
        )
    # Each watched turn beside the one before it: what else the machine does changes slowly.
    ratios = [seen / plain for plain, seen in zip(mains[False], mains[True], strict=False)]
    more = statistics.median(others[True]) - statistics.median(others[False])
    print(
        f"main thread: watched / plain {statistics.median(ratios):.4f} (median of {len(ratios)}"
        f" pairs, quartiles {_quartiles(ratios)}); other threads take {more * 1e3:.2f} ms a second"
        " more"
    )


def _quartiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.4f} and {high:.4f}"


if __name__ == "__main__":
    sys.exit(main())
