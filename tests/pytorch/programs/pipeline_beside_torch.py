import os
import socket

import numpy as np
import torch
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B as Torch1F1B

import meshlib as dist
from parallel import nn, optim
from parallel.pipeline import PipelineStage, Schedule1F1B

dist.init_process_group()
rank = dist.get_rank()
ports = [None]
if rank == 0:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1]]
dist.broadcast_object_list(ports)
os.environ.pop("MASTER_PORT", None)
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2
)
sizes = [(6, 12), (12, 8)] if rank == 0 else [(8, 12), (12, 4)]
mine, theirs = [], []
for number, (n, m) in enumerate(sizes):
    layer = nn.Linear(n, m, rng=np.random.default_rng([rank, number]), dtype="f8")
    other = torch.nn.Linear(n, m, dtype=torch.float64)
    with torch.no_grad():
        other.weight.copy_(torch.from_numpy(layer.weight.data))
        other.bias.copy_(torch.from_numpy(layer.bias.data))
    mine += [layer, nn.LayerNorm(m, dtype="f8"), nn.Tanh()][: 3 if (rank, number) != (1, 1) else 1]
    norm = torch.nn.LayerNorm(m, dtype=torch.float64)
    theirs += [other, norm, torch.nn.Tanh()][: 3 if (rank, number) != (1, 1) else 1]
own, of_torch = nn.Sequential(*mine), torch.nn.Sequential(*theirs)
schedule = Schedule1F1B(PipelineStage(own, rank, 2), 4, nn.CrossEntropyLoss())
stage = TorchStage(of_torch, rank, 2, torch.device("cpu"))
torchs = Torch1F1B(stage, 4, torch.nn.functional.cross_entropy)
optimizer = optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
other_optimizer = torch.optim.SGD(of_torch.parameters(), lr=0.1, momentum=0.9)
for step in range(20):
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(16, 6)), rng.integers(0, 4, 16)
    optimizer.zero_grad()
    other_optimizer.zero_grad()
    losses, other_losses = [], []
    schedule.step(x, target=y, losses=losses)
    if rank == 0:
        torchs.step(torch.from_numpy(x))
    else:
        torchs.step(target=torch.from_numpy(y), losses=other_losses)
    np.testing.assert_allclose(losses, [float(one) for one in other_losses], rtol=0, atol=1e-9)
    optimizer.step()
    other_optimizer.step()
    for p, q in zip(own.parameters(), of_torch.parameters(), strict=True):
        np.testing.assert_allclose(p.data, q.detach().numpy(), rtol=0, atol=1e-9)
print(f"rank {rank} agrees")
torch.distributed.destroy_process_group()
dist.destroy_process_group()
