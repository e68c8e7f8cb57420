"""The cost of the always-on checks for a small all_reduce between two ranks.

    python -m tests.benchmarks.checks [BACKEND]

Each of some jobs has two pairs of ranks, one with the checks and one without them (``unchecked``
says how), that call by turns: while one pair measures, the other waits for the store and uses no
processor. Whatever else happens on the machine so meets both alike. The pairs are
processes of their own, because Python runs code that was replaced while it ran more slowly; and
there are several jobs, because two ranks can fall into a rhythm (who waits for whom, and whether
asleep) that lasts. Time is that of the clock, and of the processor (the mean of both ranks).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import meshlib as dist
from meshlib._job.current import current_world
from tests.benchmarks import unchecked
from transport import _environment as environment
from transport._operands.reduce_op import ReduceOp

JOBS = 4
TURNS = 150
WARMUP = 20
TURN_SECONDS = 0.02
"""How long a turn is about: ranks that were woken on one core need some of it to move apart."""
_PAIRS = ((0, 1), (2, 3))
_JOB_SECONDS = 120.0
_PROGRAM = """
def make_calls(count):
    for _ in range(count):
        all_reduce(x, group=group)
"""


def main() -> None:
    """Start the jobs, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", nargs="?")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.results is not None:
        _measure(args.backend, args.results)
        return
    jobs = np.array([_run_job(args.backend) for _ in range(JOBS)])  # [job, pair, turn, which time]
    for i, name in enumerate(("clock", "processor")):
        on, off = (jobs[:, pair, :, i].ravel() for pair in range(2))
        low, middle, high = statistics.quantiles(on / off, n=4)
        sys.stdout.write(
            f"{name:9}: {statistics.median(on):6.2f} us with checks, "
            f"{statistics.median(off):6.2f} us without; ratio {middle:.3f} "
            f"(quartiles {low:.3f}, {high:.3f})\n"
        )


def _run_job(backend: str | None) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "4"]
        command += ["-m", "tests.benchmarks.checks", "--results", str(results)]
        if backend is not None:
            command.append(backend)
        subprocess.run(command, check=True, timeout=_JOB_SECONDS)
        return json.loads(results.read_text())


def _measure(backend: str | None, results: Path) -> None:
    """Be a rank; the first one writes what all have measured."""
    rank = int(os.environ[environment.RANK])
    number = next(i for i, pair in enumerate(_PAIRS) if rank in pair)
    if number == 1:
        unchecked.install()
    dist.init_process_group(backend)
    store = current_world().store
    group = dist.new_group(_PAIRS[number])
    make_calls = _program(group)
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.freeze()
    calls = 0
    for turn in range(TURNS):
        if before := turn * 2 + number:
            store.wait([f"checks/{before - 1}/{peer}" for peer in _PAIRS[1 - number]])
        calls = calls or _calls_in_a_turn(make_calls, group)
        times.append(_one_turn(make_calls, calls))
        store.set(f"checks/{turn * 2 + number}/{rank}", b"")
    store.set(f"checks/times/{rank}", json.dumps(times).encode())
    if rank == 0:
        by_rank = [
            json.loads(store.get(f"checks/times/{peer}")) for pair in _PAIRS for peer in pair
        ]
        by_pair = np.array(by_rank).reshape(len(_PAIRS), 2, TURNS, 2).mean(axis=1)
        results.write_text(json.dumps(by_pair.tolist()))
    dist.destroy_process_group()


def _program(group: dist.ProcessGroup) -> Callable[[int], None]:
    """Return what makes a number of calls from outside this project, as a user's program does.

    The search for the user's line would else go on beyond this file.
    """
    names: dict[str, Any] = {"all_reduce": dist.all_reduce, "group": group}
    names["x"] = np.zeros(2, np.float32)
    exec(compile(_PROGRAM, "<program>", "exec"), names)
    return names["make_calls"]


def _calls_in_a_turn(make_calls: Callable[[int], None], group: dist.ProcessGroup) -> int:
    """Return a number of calls that both ranks of ``group`` agree on."""
    make_calls(10 * WARMUP)
    began = time.perf_counter()
    make_calls(WARMUP)
    count = np.array([TURN_SECONDS / (time.perf_counter() - began) * WARMUP])
    dist.all_reduce(count, ReduceOp.AVG, group=group)
    return int(count[0])


def _one_turn(make_calls: Callable[[int], None], calls: int) -> tuple[float, float]:
    """Return what a call takes by the clock and of this rank's processor, in microseconds."""
    make_calls(max(WARMUP, calls // 5))
    began, ran = time.perf_counter(), time.process_time()
    make_calls(calls)
    ran, took = time.process_time() - ran, time.perf_counter() - began
    return took / calls * 1e6, ran / calls * 1e6


if __name__ == "__main__":
    main()
