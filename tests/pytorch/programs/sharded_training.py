"""What each rank of ``test_sharded.py`` runs: the same weights trained by meshlib and by FSDP2.

    meshrun --nproc-per-node 4 tests/pytorch/programs/sharded_training.py FOLDER

FSDP2 runs over Gloo, whose ranks meet in FOLDER. Every pair of runs must give the same losses and
the same parameters, in float64, except for rounding.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import nn as tnn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import meshlib as dist
from parallel import optim
from tests.support.parallel.fsdp_training import MODELS, VOCABULARY, WIDTH, shard, train, whole

STEPS = 5
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Attention(tnn.Module):
    """As in ``fsdp_training``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = tnn.Linear(WIDTH, 3 * WIDTH)
        self.out = tnn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of one head, without a mask."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ v)


class Residual(tnn.Module):
    """x + layers(x)."""

    def __init__(self, *layers: tnn.Module) -> None:
        super().__init__()
        self.inner = tnn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return x + self.inner(x)


class Unembed(tnn.Module):
    """Scores by the vectors of an embedding, of the last position."""

    def __init__(self, weight: tnn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        return x @ self.weight.T


class Last(tnn.Module):
    """The last position's vector."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return x[:, -1]


def torch_mlp() -> tnn.Sequential:
    """Return the model of ``make_mlp``."""
    return tnn.Sequential(
        tnn.Sequential(tnn.Linear(6, 17), tnn.Tanh()),
        tnn.Sequential(tnn.LayerNorm(17), tnn.Linear(17, 18)),
        tnn.GELU("tanh"),
        tnn.Linear(18, 3),
    )


def torch_transformer() -> tnn.Sequential:
    """Return the model of ``make_transformer``."""
    embedding = tnn.Embedding(VOCABULARY, WIDTH)

    def block() -> tnn.Module:
        up, down = tnn.Linear(WIDTH, 4 * WIDTH), tnn.Linear(4 * WIDTH, WIDTH)
        return tnn.Sequential(
            Residual(tnn.LayerNorm(WIDTH), Attention()),
            Residual(tnn.LayerNorm(WIDTH), up, tnn.GELU("tanh"), down),
        )

    return tnn.Sequential(embedding, block(), block(), Last(), Unembed(embedding.weight))


TORCH = {"mlp": torch_mlp, "transformer": torch_transformer}


def torch_train(model, batches, rank, world):
    """Train as ``fsdp_training.train`` does, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    losses = []
    for step in range(STEPS):
        x, y = (torch.from_numpy(part) for part in batches(step, rank, world))
        optimizer.zero_grad()
        loss = tnn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Compare all pairs of runs."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    rank, world = dist.get_rank(), dist.get_world_size()
    store = f"file://{sys.argv[1]}/gloo"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    pairs = {
        "fsdp": (mesh.flatten("flat"), init_device_mesh("cpu", (world,))),
        "hsdp": (mesh, init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))),
    }
    for name, (make, batches) in MODELS.items():
        for kind, (ours, theirs) in pairs.items():
            for reshard in (True, False):
                model = make()
                reference = TORCH[name]()
                state = {path: torch.tensor(value) for path, value in model.state_dict().items()}
                reference.load_state_dict(state)
                for layer in reference:
                    # The embedding, which is used at both ends, stays with the outermost module.
                    if not isinstance(layer, tnn.Embedding | Unembed) and list(layer.parameters()):
                        torch_fully_shard(layer, mesh=theirs, reshard_after_forward=reshard)
                torch_fully_shard(reference, mesh=theirs, reshard_after_forward=reshard)
                model = shard(model, ours, reshard_after_forward=reshard)
                optimizer = optim.AdamW(model.parameters(), **OPTIONS)
                losses = train(model, batches, rank, world, STEPS, optimizer=optimizer)
                expected = torch_train(reference, batches, rank, world)
                np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)
                got = whole(model.state_dict())
                for path, value in reference.state_dict().items():
                    full = value.full_tensor() if hasattr(value, "full_tensor") else value
                    np.testing.assert_allclose(got[path], full.numpy(), rtol=0, atol=1e-10)
                if rank == 0:
                    print(f"{name} {kind} reshard={reshard}: equal after {STEPS} steps")
    torch.distributed.destroy_process_group()
    dist.destroy_process_group()


main()
