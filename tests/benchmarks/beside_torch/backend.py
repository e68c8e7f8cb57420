"""PyTorch over meshlib beside PyTorch over Gloo: in one set of processes, in turn; medians.

    python tests/benchmarks/beside_torch/backend.py --ranks 2,4

A training step of DistributedDataParallel with 20 million parameters (80 MB of gradients) on a
batch of 8, an all_reduce of 80 MB and one of 8 bytes. Needs PyTorch; each rank has one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

BACKENDS = ("meshlib", "gloo")
WIDTH = 2236  # four layers of it have 20 million parameters
MEGABYTES = 80


def run_rank(rank: int, ranks: int, rounds: int, meet: str, report) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist
    from torch import nn

    import meshlib.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(
        "meshlib",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
    )
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}

    def ddp(group) -> Callable[[], object]:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        model = nn.parallel.DistributedDataParallel(layers, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(8, WIDTH)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    def reduction(group, count: int) -> Callable[[], object]:
        x = torch.zeros(count)
        return lambda: dist.all_reduce(x, group=group)

    cases = {
        "DDP step, 20M parameters": (1, ddp),
        f"all_reduce, {MEGABYTES} MB": (1, lambda g: reduction(g, MEGABYTES * 1_000_000 // 4)),
        "all_reduce, 8 B": (200, lambda g: reduction(g, 2)),
    }
    for case, (repeat, make) in cases.items():
        calls = {name: make(group) for name, group in groups.items()}
        times: dict[str, list[float]] = {name: [] for name in BACKENDS}
        for number in range(rounds + 2):
            for name in BACKENDS if number % 2 else BACKENDS[::-1]:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(repeat):
                    calls[name]()
                dist.barrier()
                if number >= 2:  # the first ones meet, fault memory in and find the buckets
                    times[name].append((time.perf_counter() - begin) / repeat)
        if rank == 0:
            report.send((case, times))
        del calls
    dist.destroy_process_group()


def show(ranks: int, case: str, times: dict[str, list[float]]) -> None:
    middle = {name: statistics.median(found) for name, found in times.items()}
    parts = []
    for name in BACKENDS:
        low, _, high = statistics.quantiles(times[name], n=4)
        spread = f"quartiles {low * 1e3:.3f}, {high * 1e3:.3f}; least {min(times[name]) * 1e3:.3f}"
        parts.append(f"{name} {middle[name] * 1e3:.3f} ms ({spread})")
    ratio = middle["meshlib"] / middle["gloo"]
    print(f"{ranks} ranks  {case:26} {', '.join(parts)}: ratio {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for ranks in map(int, options.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs = spawn.Pipe()
            processes = [
                spawn.Process(
                    target=run_rank, args=(rank, ranks, options.rounds, f"{folder}/meet", theirs)
                )
                for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            theirs.close()
            try:
                while True:
                    show(ranks, *ours.recv())
            except EOFError:
                pass
            finally:
                for process in processes:
                    process.join(30)
                    process.kill()


if __name__ == "__main__":
    main()
