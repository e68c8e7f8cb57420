"""A user's program: `test_typing.py` has it checked under strict pyright."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import numpy.typing as npt

import meshlib as dist
from parallel import DistributedDataParallel, DistributedSampler, nn, optim


def main() -> None:
    mesh = dist.init_device_mesh("cpu", (-1, 2), mesh_dim_names=("dp", "tp"))
    assert_type(mesh["dp"], dist.DeviceMesh)
    assert_type(mesh["dp"].process_group, dist.ProcessGroup)
    values: npt.NDArray[np.float32] = np.ones(4, np.float32)
    mesh["tp"].all_reduce(values, dist.ReduceOp.MAX)
    total: npt.NDArray[np.float32] = dist.all_reduce(values)
    work: dist.Work = dist.all_reduce(total, async_op=True)
    assert_type(work.wait(), bool)
    assert_type(work.get_future(), dist.Future)
    assert_type(dist.get_rank(), int)
    group = dist.new_group([0, 1], timeout="30s")
    assert_type(group, dist.ProcessGroup)
    assert_type(dist.group.WORLD, dist.ProcessGroup)

    model = nn.Sequential(nn.Linear(4, 2, rng=np.random.default_rng(0)))
    wrapped = DistributedDataParallel(model, mesh["dp"])
    assert_type(wrapped, DistributedDataParallel)
    sgd = optim.SGD(wrapped.parameters(), lr=0.1)
    sampler = DistributedSampler(range(100))
    for _ in sampler:
        sgd.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
