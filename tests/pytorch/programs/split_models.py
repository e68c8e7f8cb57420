"""A rank of PyTorch, over Gloo: a GPT by ``parallelize_module``, and PyTorch's own ring attention.

``python split_models.py RANK FOLDER``, for two ranks: FOLDER/given.npz has weights and data, and
FOLDER/RANK.npz gets the results. Double precision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

RANKS = 2


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, blocks: int, vocabulary: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def plan(blocks: int) -> dict[str, Any]:
    styles: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(blocks):
        styles |= {
            f"blocks.{i}.attention_norm": SequenceParallel(),
            f"blocks.{i}.mlp_norm": SequenceParallel(),
            f"blocks.{i}.attention": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            **{f"blocks.{i}.attention.{n}": ColwiseParallel() for n in ("query", "key", "value")},
            f"blocks.{i}.attention.output": RowwiseParallel(output_layouts=Shard(1)),
            f"blocks.{i}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"blocks.{i}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return styles


def train(given: Any) -> dict[str, Any]:
    """Train with sequence parallelism; return the losses and the whole parameters."""
    mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = GPT(*(int(x) for x in given["sizes"]))
    weights = {key[2:]: torch.tensor(given[key]) for key in given if key.startswith("w.")}
    model.load_state_dict(weights)
    parallelize_module(model, mesh["tp"], plan(int(given["sizes"][0])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses = []
    for tokens, targets in zip(
        *(torch.tensor(given[n]) for n in ("tokens", "targets")), strict=True
    ):
        optimizer.zero_grad()
        logits = model(tokens)
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        losses.append(float(loss))
    whole = {f"w.{path}": p.full_tensor() for path, p in model.named_parameters()}
    return {"losses": losses, **{path: x.detach().numpy() for path, x in whole.items()}}


def ring(given: Any) -> dict[str, Any]:
    """Run PyTorch's ring attention with its operator for the CPU, on this rank's places."""
    from torch.distributed.tensor.experimental import _attention
    from torch.distributed.tensor.experimental._context_parallel import _attention as inner

    inner._cp_options.convert_to_f32 = False
    _attention.set_rotate_method("alltoall")
    rank = dist.get_rank()
    group = dist.group.WORLD
    chunks = [rank, 2 * RANKS - 1 - rank]

    def own(name: str) -> torch.Tensor:  # (batch, length, heads, d), of a zig-zag
        parts = torch.tensor(given[name]).transpose(1, 2).chunk(2 * RANKS, dim=2)
        return torch.cat([parts[i] for i in chunks], dim=2).contiguous()

    q, k, v, grad = (own(name) for name in "qkvg")
    aten = torch.ops.aten
    out, logs, *_ = inner._templated_ring_attention(
        group, 2, aten._scaled_dot_product_flash_attention_for_cpu, q, k, v, is_causal=True
    )
    grads = inner._templated_ring_attention_backward(
        group,
        2,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        grad,
        "grad_out",
        q,
        k,
        v,
        out,
        logs,
        is_causal=True,
        dropout_p=0.0,
    )
    results = dict(zip(("out", "gq", "gk", "gv"), (out, *grads[:3]), strict=True))
    return {name: x.transpose(1, 2).numpy() for name, x in results.items()}


def main(rank: int, folder: Path) -> None:
    """Do both, over Gloo."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    given = dict(np.load(folder / "given.npz"))
    np.savez(folder / f"{rank}.npz", **train(given), **ring(given))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
