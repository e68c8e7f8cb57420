"""The cost of an elastic loop for a step.

    meshrun -n 4 tests/benchmarks/elastic/overhead.py

Batches of steps of 50 ms (a sleep, and an all-reduce of 8 KiB), with and without, in turn: the
median of each, and of steps that do nothing but draw samples and vote; a rank's processor time and
time asleep and awake.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import meshlib as dist
from parallel.elastic import ElasticBatches, ElasticMesh

STEP, BATCH, TURNS = 0.05, 20, 6


def work(mesh: dist.DeviceMesh, seconds: float) -> None:
    """Stand for a step."""
    time.sleep(seconds)
    mesh.all_reduce(np.ones(1024))


def main() -> None:
    """Print the medians on rank 0."""
    dist.init_process_group()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    names = ("without", "with", "alone")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    with ElasticMesh(mesh, "dp") as elastic:
        batches = ElasticBatches(10_000, 64)
        steps = iter(elastic.steps({"model": np.zeros(4)}, 2 * TURNS * BATCH, batches=batches))

        def step(name: str) -> None:
            if name == "without":
                work(mesh, STEP)
                return
            with next(steps) as current:
                if name == "with":
                    work(current, STEP)

        for _ in range(TURNS):
            for name in names:
                used = time.process_time()
                for _ in range(BATCH):
                    begun = time.perf_counter()
                    step(name)
                    seconds[name].append(time.perf_counter() - begun)
                processor[name].append((time.process_time() - used) / BATCH)
        list(steps)
    if dist.get_rank() == 0:
        without, with_, alone = (1e3 * statistics.median(seconds[name]) for name in names)
        used = {name: 1e3 * statistics.median(processor[name]) for name in names}
        print(
            f"{mesh.size()} ranks, median of {TURNS * BATCH} steps: {without:.2f} ms without,"
            f" {with_:.2f} ms with ({100 * (with_ - without) / without:+.1f} %); processor time"
            f" {used['without']:.3f} and {used['with']:.3f} ms; a step that only votes:"
            f" {alone:.3f} ms, processor time {used['alone']:.3f}"
        )


if __name__ == "__main__":
    main()
