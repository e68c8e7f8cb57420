"""Cases of the libraries above: DDP, FSDP, DTensor, pipelines, checkpoints."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from registry import RANKS, backend, case, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(seeded(6, 8, rank=100 * step + dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def full(parameters):
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in parameters]


def ddp(register=None):
    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    if register is not None:
        register(model)
    return [*train(model), *full(model.parameters())]


@case
def ddp_without_a_hook():
    return ddp()


@case
def compiled_ddp():
    """Its buffers are broadcast from C++ in the middle of what Dynamo has compiled."""
    model = nn.Sequential(network(), nn.BatchNorm1d(4))
    return [*train(torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager"), 4)]


@case
def ddp_with_hooks_that_compress():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    results = ddp(lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook))
    return results + ddp(lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook))


@case
def ddp_with_power_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    torch.manual_seed(2)
    model = nn.parallel.DistributedDataParallel(network())  # one bucket: its calls have one order
    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    return [*train(model, 5), *full(model.parameters())]


@case
def fsdp2():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = network()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    results = [*train(model), *full(model.parameters())]
    half = network()
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    half(seeded(6, 8)).float().square().mean().backward()
    return results + full(half.parameters())


@case
def hsdp():
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = network()
    fully_shard(model, mesh=mesh)
    return [*train(model), *full(model.parameters())]


@case
def dtensor():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = seeded(6, 5, rank=3)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    results = [x.full_tensor(), x.redistribute(mesh, [Shard(1), Replicate()]).to_local()]
    part = DTensor.from_local(seeded(4, 4), mesh, [Partial(), Replicate()])
    results.append(part.redistribute(mesh, [Shard(1), Replicate()]).to_local())
    results.append((x @ x.T).full_tensor())
    return results


@case
def tensor_parallel():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), mesh, plan)
    loss = model(seeded(6, 8, rank=5)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in model[0].parameters())]


@case
def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    torch.manual_seed(7)
    stages = [nn.Linear(8, 8) for _ in range(RANKS)]
    stage = PipelineStage(stages[rank], rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    x, goal, losses = seeded(8, 8, rank=1), seeded(8, 8, rank=2), []
    if rank == 0:
        schedule.step(x)
    elif rank == RANKS - 1:
        schedule.step(target=goal, losses=losses)
    else:
        schedule.step()
    return [stages[rank].weight.grad, *losses]


@case
def distributed_checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model)
    train(model, 1)
    path = os.path.join(sys.argv[2], f"checkpoint-{backend()}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    other = network()
    fully_shard(other)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    return full(other.parameters())
