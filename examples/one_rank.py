"""Profile a training step of one rank of 4096 on this machine: calls, bytes, memory and time.

    python examples/one_rank.py --rank 17

The other 4095 ranks do not exist (``backend="fake"``). The mesh has 16 replicas of 32 shards, and
each layer is split over 8 ranks: dp_replicate=16, dp_shard=32, tp=8. The model is a stack of MLPs.
"""

from __future__ import annotations

import argparse
import tracemalloc

import numpy as np

import meshlib as dist
from meshlib import DeviceMesh
from parallel import ColwiseParallel, RowwiseParallel, fully_shard, nn, optim, parallelize

DIMS = {"dp_replicate": 16, "dp_shard": 32, "tp": 8}


def make_model(width: int, layers: int, mesh: DeviceMesh) -> nn.Sequential:
    """Return this rank's part of ``layers`` MLPs of (``width``, 4 ``width``, ``width``)."""
    rng = np.random.default_rng(0)
    blocks = []
    for _ in range(layers):
        block = nn.Sequential(
            nn.Linear(width, 4 * width, rng=rng), nn.GELU(), nn.Linear(4 * width, width, rng=rng)
        )
        parallelize(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh["dp_replicate", "dp_shard"])
        blocks.append(block)
    model = nn.Sequential(*blocks)
    fully_shard(model, mesh["dp_replicate", "dp_shard"])
    return model


def main() -> None:
    """Make the model, and profile its second step, because the first one allocates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()

    dist.init_process_group(backend="fake", rank=given.rank, world_size=16 * 32 * 8)
    mesh = dist.init_device_mesh("cpu", tuple(DIMS.values()), mesh_dim_names=tuple(DIMS))
    tracemalloc.start()
    model = make_model(given.width, given.layers, mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    loss = nn.MSELoss()
    inputs = np.ones((8, given.width), np.float32)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), np.zeros_like(inputs))
        model.backward(loss.backward())
        optimizer.step()

    step()
    tracemalloc.reset_peak()
    with dist.profile() as profile:
        step()
    print(f"rank {given.rank} of {dist.get_world_size()}, at {mesh.get_coordinate()} of {mesh}")
    print(profile)
    print(f"memory of a step: {tracemalloc.get_traced_memory()[1] / 1e6:.1f} MB at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
