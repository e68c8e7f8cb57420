"""The effects of a cut in a network with delay on collectives; as root.

    python -m tests.benchmarks.delay.cut

Two ranks reduce 4 MiB again and again across 10 ms. For 2 s the network loses everything: no call
fails, and all sums are right. Then it stays cut: both ranks raise at the deadline, and name the
other one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np

import meshlib as dist
from tests.benchmarks.delay.__main__ import Network

_ROUND_TRIP, _DEADLINE = 0.010, 6


def rank_main(rank: int, addresses: list[str]) -> None:
    """Reduce until a call fails; say how many were right, how long the slowest took, and why."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=addresses[0], MASTER_PORT="29410",
        MESHLIB_HOST=addresses[rank], MESHLIB_SECRET="0123456789abcdef" * 4,
    )  # fmt: skip
    dist.init_process_group("tcp", timeout=timedelta(seconds=_DEADLINE))
    right, slowest = 0, 0.0
    while True:
        x = np.full(1 << 20, rank + 1.0, np.float32)
        begin = time.monotonic()
        try:
            dist.all_reduce(x)
        except dist.DistError as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            waited = time.monotonic() - begin
            print(
                f"rank {rank}: {right} right, slowest {slowest:.1f} s; after {waited:.1f} s {text}",
                flush=True,
            )
            os._exit(0)
        assert (x == 3).all()
        right, slowest = right + 1, max(slowest, time.monotonic() - begin)
        if right == 1:
            print(f"rank {rank} has begun", flush=True)


def main() -> None:
    """Start the ranks, cut, mend, cut."""
    network = Network(2, _ROUND_TRIP)
    ranks: list[subprocess.Popen[str]] = []
    try:
        module = "tests.benchmarks.delay.cut"
        for rank in range(2):
            command = [sys.executable, "-m", module, str(rank), *network.addresses]
            ranks.append(network.start(rank, command, stdout=subprocess.PIPE))
        outputs = [process.stdout for process in ranks if process.stdout is not None]
        for lines in outputs:
            print(lines.readline(), end="", flush=True)
        time.sleep(3)
        network.wire.send_signal(signal.SIGUSR1)
        time.sleep(2)
        network.wire.send_signal(signal.SIGUSR1)
        time.sleep(6)
        network.wire.send_signal(signal.SIGUSR1)
        for lines in outputs:
            print(lines.read(), end="", flush=True)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        network.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(int(sys.argv[1]), sys.argv[2:])
    else:
        main()
