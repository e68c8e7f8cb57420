"""A small all_reduce on busy cores: ``python -m tests.benchmarks.delay.strangers``.

As many busy processes as ``--strangers`` says run beside two ranks, which call all_reduce with 4
bytes again and again. Prints mean, median and 90th percentile of rank 0's calls in microseconds:
with nobody else, then beside the strangers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import numpy as np

import meshlib as dist

_BUSY = "while True: pass"
_CALLS = 3000
_SECONDS = 20.0


def measure(backend: str) -> None:
    """Be a rank: time calls, and print what rank 0 found."""
    dist.init_process_group(backend)
    x, took = np.ones(1, np.float32), list[float]()
    for _ in range(100):
        dist.all_reduce(x)
    begin = time.perf_counter()
    for _ in range(_CALLS):
        before = time.perf_counter()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        took.append(time.perf_counter() - before)
        over = np.array([time.perf_counter() - begin > _SECONDS / 2])
        if len(took) % 100 == 0 and dist.all_reduce(over, dist.ReduceOp.MAX)[0]:
            break
    if dist.get_rank() == 0:
        middle, most = np.percentile(took, [50, 90]) * 1e6
        print(f"{np.mean(took) * 1e6:10.1f} {middle:10.1f} {most:10.1f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure alone and beside strangers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strangers", type=int, default=2)
    parser.add_argument("--backend", default="shm")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.backend)
        return
    command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "2"]
    command += ["--module", "tests.benchmarks.delay.strangers", "--backend", args.backend]
    for strangers in (0, args.strangers):
        busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(strangers)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        finally:
            for process in busy:
                process.kill()
                process.wait()
        print(f"{strangers:3} strangers {done.stdout.rstrip()}", flush=True)


if __name__ == "__main__":
    main()
