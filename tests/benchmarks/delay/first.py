"""The cost of starting across a network with delay, in round trips; as root.

    python -m tests.benchmarks.delay.first [--ranks 8] [--round-trip 50] [--backends tcp,auto]

Each rank is in a network namespace of its own, rank 0 serves the store. Rows: backend, then how
many round trips ``init_process_group``, the first all_reduce of 8 bytes and the second one take,
for the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np

import meshlib as dist
from meshlib._job.current import current_world
from tests.benchmarks.delay.__main__ import Network


def rank_main(rank: int, backend: str, round_trip: float, addresses: list[str]) -> None:
    """Begin, reduce twice, and say how many round trips each took here."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(len(addresses)), MASTER_ADDR=addresses[0],
        MASTER_PORT="29420", MESHLIB_HOST=addresses[rank], MESHLIB_SECRET="0123456789abcdef" * 4,
    )  # fmt: skip
    np.add(np.ones(2), 1.0)
    found: list[float] = []
    begin = time.monotonic()
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    found.append(time.monotonic() - begin)
    _start_together(rank)
    for _ in range(2):
        begin = time.monotonic()
        dist.all_reduce(np.ones(2, np.float32))
        found.append(time.monotonic() - begin)
    print(json.dumps([seconds / round_trip for seconds in found]), flush=True)
    dist.destroy_process_group()


def _start_together(rank: int) -> None:
    """Return at a moment that rank 0 sets: all ranks share this machine's clock."""
    store = current_world().store
    if rank == 0:
        store.set("begin", str(time.monotonic() + 1.5))
    time.sleep(max(0.0, float(store.get("begin")) - time.monotonic()))


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--round-trip", type=float, default=50, help="milliseconds")
    parser.add_argument("--backends", default="tcp,auto")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    round_trip = options.round_trip / 1000
    network = Network(options.ranks, round_trip)
    started: list[subprocess.Popen[str]] = []
    try:
        for backend in options.backends.split(",") * options.rounds:
            words = [backend, str(round_trip), *network.addresses]
            module = [sys.executable, "-m", "tests.benchmarks.delay.first"]
            ranks = [
                network.start(rank, [*module, str(rank), *words], stdout=subprocess.PIPE)
                for rank in range(options.ranks)
            ]
            started += ranks
            rows = [json.loads(process.communicate(timeout=120)[0]) for process in ranks]
            init, first, second = (max(column) for column in zip(*rows, strict=True))
            print(f"{backend:5} begin {init:5.1f}  first {first:5.1f}  second {second:5.2f}")
    finally:
        for process in started:
            process.kill()
            process.wait()
        network.close()


if __name__ == "__main__":
    if len(sys.argv) > 4 and sys.argv[1].isdigit():
        rank_main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    else:
        main()
