"""Tensors of another device, which no machine has to have, go to that device's backend."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers a backend)

import meshlib.torch

for _ in range(2):
    dist.init_process_group("cpu:meshlib,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert world._device_types == [cpu, cuda]
    assert world._get_backend(cpu) is world
    assert type(world._get_backend(cuda)).__name__ == "FakeProcessGroup"
    x = torch.ones(2)
    dist.all_reduce(x)
    received = [None]
    dist.all_gather_object(received, "words")
    assert received == ["words"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = torch.ones(4, device="cuda")
        dist.all_reduce(y)
        dist.reduce(y, dst=0)
        dist.all_gather_single(torch.ones(4, device="cuda"), y)
        dist.reduce_scatter_single(torch.ones(4, device="cuda"), y)
        dist.all_to_all_single(torch.ones(4, device="cuda"), y)
    part = dist.new_group([0])
    assert part._get_backend(cuda) is not part
    # What holds the other devices' backends is nobody's to find.
    assert set(dist.distributed_c10d._world.pg_map) == {world, part}
    dist.destroy_process_group(part)
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert not meshlib.is_initialized()
