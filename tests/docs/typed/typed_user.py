"""A user's program: `make check` has it checked under strict pyright, `test_typing.py` runs it.

Where its types were not seen at all, ``assert_type`` would say so.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import meshlib as dist
from meshlib import DeviceMesh, Future, ProcessGroup, Work, init_device_mesh
from parallel import DistributedDataParallel, DistributedSampler, GradBucket, nn, optim

Floats = NDArray[np.float64]


def collectives(mesh: DeviceMesh) -> float:
    """Every way in which an array goes in and comes out."""
    assert_type(mesh["dp"], DeviceMesh)
    assert_type(mesh["dp"].process_group, ProcessGroup)
    assert_type(dist.group.WORLD, ProcessGroup)
    assert_type(dist.new_group([0, 1], timeout="30s"), ProcessGroup)
    assert_type(dist.get_rank(), int)
    x: Floats = np.ones(4)
    assert_type(dist.all_reduce(x), Floats)
    assert_type(mesh["dp"].all_reduce(x, dist.ReduceOp.AVG), Floats)
    work = dist.all_reduce(x, group=mesh["dp"], async_op=True)
    assert_type(work, Work[Floats])
    assert_type(work.wait(timeout=10), bool)
    assert_type(work.result(), Floats)
    assert_type(work.get_future(), Future[Floats])
    total = work.get_future().then(lambda done: float(done.value().sum()))
    assert_type(total, Future[float])
    later = bool(dist.get_rank() < 0)
    assert_type(dist.broadcast(x, 0, async_op=later), Floats | Work[Floats])
    parts: list[Floats] = [np.empty(4) for _ in range(dist.get_world_size())]
    assert_type(dist.all_gather(parts, x), list[Floats])
    whole: Floats = np.empty(4 * dist.get_world_size())
    assert_type(dist.all_gather_into_tensor(whole, x, async_op=True).result(), Floats)
    assert_type(dist.reduce_scatter_tensor(x, whole), Floats)
    assert_type(dist.gather(x, parts if dist.get_rank() == 0 else None, dst=0), list[Floats] | None)
    assert_type(dist.all_to_all_single(whole, whole.copy()), Floats)
    assert_type(dist.barrier(async_op=True), Work[None])
    dist.barrier()
    both = dist.collect_all([dist.all_reduce(x, async_op=True), None])
    assert_type(both, Work[list[Floats]])
    both.wait()
    assert_type(dist.collect_all([both.get_future()]), Future[list[Future[list[Floats]]]])
    return total.wait(10)


def averaged(state: object, bucket: GradBucket) -> Future[Any]:
    """A hook of the user's own."""
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future()


def training(group: ProcessGroup) -> list[float]:
    """Train a little network data parallel; return its losses."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(16, 4)).astype(np.float32)
    targets = inputs[:, :1]
    network = nn.Sequential(nn.Linear(4, 8, rng=rng), nn.ReLU(), nn.Linear(8, 1, rng=rng))
    model = DistributedDataParallel(network, process_group=group)
    model.register_comm_hook(None, averaged)
    assert_type(model, DistributedDataParallel)
    optimizer = optim.SGD(network.parameters(), lr=0.1)
    sampler = DistributedSampler(range(len(inputs)), seed=1)
    losses: list[float] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        mine = list(sampler)
        error = model(inputs[mine]) - targets[mine]
        optimizer.zero_grad()
        model.backward(2 * error / len(mine))
        optimizer.step()
        losses.append(float((error**2).mean()))
    return losses


def main() -> tuple[float, list[float]]:
    """Run on every rank of a mesh."""
    with init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)) as mesh:
        return collectives(mesh), training(mesh["dp"].process_group)
