"""What a step of an elastic loop costs beyond the same step without one.

    meshrun -n 4 tests/benchmarks/elastic/overhead.py

Batches of steps of 50 ms (a sleep, and an all-reduce of 8 KiB), with and without, in turn; the
median of each, and that of steps that do nothing but vote.
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
    plain: list[float] = []
    elastic_times: list[float] = []
    empty: list[float] = []
    with ElasticMesh(mesh, "dp") as elastic:
        batches = ElasticBatches(10_000, 64)
        steps = iter(elastic.steps({"model": np.zeros(4)}, 2 * TURNS * BATCH, batches=batches))
        for _ in range(TURNS):
            for times, seconds in ((elastic_times, STEP), (empty, 0.0)):
                for _ in range(BATCH):
                    begun = time.perf_counter()
                    with next(steps) as current:
                        if seconds:
                            work(current, seconds)
                    times.append(time.perf_counter() - begun)
            for _ in range(BATCH):
                begun = time.perf_counter()
                work(mesh, STEP)
                plain.append(time.perf_counter() - begun)
        list(steps)
    if dist.get_rank() == 0:
        without, with_, alone = (1e3 * statistics.median(t) for t in (plain, elastic_times, empty))
        print(
            f"{mesh.size()} ranks, median of {len(plain)} steps: {without:.2f} ms without,"
            f" {with_:.2f} ms with ({100 * (with_ - without) / without:+.1f} %);"
            f" a step that only votes: {alone:.3f} ms"
        )


if __name__ == "__main__":
    main()
