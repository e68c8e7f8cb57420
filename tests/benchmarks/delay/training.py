"""Data parallel training across a network with delay, beside PyTorch's over Gloo; as root.

    python -m tests.benchmarks.delay.training [ROUND_TRIP_MS] [ROUNDS] [--asleep MS] [--congestion]

The model of ``tests.benchmarks.data_parallel`` (67 MB of gradients) on two ranks, each in a network
namespace. In each round each library makes a step alone, a synchronised one, and an all_reduce of
each of the 4 matrices, one after the other. Medians of the slower rank. *Added* is what a
synchronised step takes more than one alone; *hidden* is the share of these all_reduces' time that
is not added: shares compare where these take as long, who waits less in them has less to hide.
*Busy* is the processor time of the whole machine over what its processors have: at 1 nothing more
can be hidden.

With ``--asleep`` a batch is a single row, and each layer sleeps for so long forward, twice as long
backward: as a host waits for its accelerator, or has processors that ranks and wire do not share.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.delay.__main__ import Network

_WIDTH, _BATCH, _WARM = 2048, 64, 2


def rank_main(rank: int, rounds: int, asleep: float, addresses: list[str]) -> None:
    """Make steps of both libraries by turns; rank 0 prints the row."""
    import meshlib as dist
    from tests.benchmarks.data_parallel.trainers import LAYERS
    from tests.benchmarks.delay.asleep import SleepingNumPyTrainer, SleepingTorchTrainer

    torch: Any = importlib.import_module("torch")
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=addresses[0], MASTER_PORT="29420",
        MESHLIB_HOST=addresses[rank], MESHLIB_SECRET="0123456789abcdef" * 4,
        GLOO_SOCKET_IFNAME="eth0",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("tcp", timeout=timedelta(seconds=120))
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}:29521", rank=rank, world_size=2
    )
    trainers: dict[str, Any] = {
        "meshlib": SleepingNumPyTrainer(asleep),
        "torch": SleepingTorchTrainer(asleep),
    }
    for trainer in trainers.values():
        trainer.build(rank, _WIDTH, 1 if asleep else _BATCH)
    ours = [np.ones((_WIDTH, _WIDTH), np.float32) for _ in range(LAYERS)]
    theirs: list[Any] = [torch.ones(_WIDTH, _WIDTH) for _ in range(LAYERS)]
    mesh: Any = dist.all_reduce
    gloo: Any = torch.distributed.all_reduce

    def sum_all(all_reduce: Any, arrays: list[Any]) -> None:
        for array in arrays:
            all_reduce(array)

    sums = {"meshlib": partial(sum_all, mesh, ours), "torch": partial(sum_all, gloo, theirs)}
    found: dict[tuple[str, str], list[float]] = {}
    busy: dict[tuple[str, str], float] = {}
    for turn in range(rounds + _WARM):
        for library, trainer in trainers.items():
            for what, call in (
                ("alone", lambda trainer=trainer: trainer.step(False)),
                ("together", lambda trainer=trainer: trainer.step(True)),
                ("sums", sums[library]),
            ):
                dist.barrier()
                used, begin = _used(), time.perf_counter()
                call()
                took = np.array([time.perf_counter() - begin])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if turn >= _WARM:
                    found.setdefault((library, what), []).append(float(took[0]))
                    busy[library, what] = busy.get((library, what), 0.0) + _used() - used
    if rank == 0:
        medians = {key: 1e3 * statistics.median(times) for key, times in found.items()}
        for library in trainers:
            alone, together, sums_alone = (
                medians[library, what] for what in ("alone", "together", "sums")
            )
            added = together - alone
            shares = (
                busy[library, what] / sum(found[library, what]) / (os.cpu_count() or 1)
                for what in ("alone", "together", "sums")
            )
            print(
                f"{library:8} alone {alone:8.1f} ms  together {together:8.1f}"
                f"  added {added:8.1f}  sums {sums_alone:8.1f}"
                f"  hidden {1 - added / sums_alone:6.2f}"
                f"  busy {' '.join(f'{share:.2f}' for share in shares)}",
                flush=True,
            )
        print(
            f"step {medians['meshlib', 'together'] / medians['torch', 'together']:.2f}", flush=True
        )
    dist.barrier()
    torch.distributed.destroy_process_group()
    dist.destroy_process_group()


def _used() -> float:
    """Return the seconds that the machine's processors have worked."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    user, nice, system, _, _, irq, softirq, steal = map(int, words[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("round_trip", type=float, nargs="?", default=10.0, help="milliseconds")
    parser.add_argument("rounds", type=int, nargs="?", default=7)
    parser.add_argument("--asleep", type=float, default=0.0, help="milliseconds a layer")
    parser.add_argument("--congestion", default="", help="control: cubic, bbr")
    options = parser.parse_args()
    network = Network(2, options.round_trip / 1e3, congestion=options.congestion)
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(2):
            plan = [rank, options.rounds, options.asleep / 1e3, network.addresses]
            words = [json.dumps(plan)]
            module = "tests.benchmarks.delay.training"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-W", "ignore", "-m", module, *words]
            ranks.append(network.start(rank, command, env=environment))
        for process in ranks:
            process.wait(500)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        network.close()


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        rank_main(*json.loads(sys.argv[1]))
    else:
        main()
