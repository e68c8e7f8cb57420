"""Data parallel trainers, and a server with an embedding too large for a trainer.

    meshrun --nproc-per-node 3 examples/rpc/ddp_embedding_server.py

The last rank has the embedding. Each other rank looks up rows in it, and has a replica of the dense
part. DistributedDataParallel averages the dense gradients over the trainers. The embedding's
gradients go back to the server. One DistributedOptimizer steps both.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import meshlib as dist
from meshlib import rpc
from parallel import DistributedDataParallel, nn, optim
from parallel.rpc import DistributedOptimizer, RemoteModule, dist_autograd

WORDS, CLASSES, LENGTH, COLUMNS = 300, 3, 9, 16


class Mean(nn.Module):
    """The mean of the rows of each sample: (samples, rows, columns) to (samples, columns)."""

    def forward(self, x: Any) -> Any:
        """Return the mean over the rows."""
        self.save_for_backward(x.shape)
        return x.mean(axis=1)

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the rows."""
        shape = self.saved()
        return np.broadcast_to(grad[:, None, :] / shape[1], shape).astype(grad.dtype)


def draw(rng: np.random.Generator, samples: int) -> tuple[Any, Any]:
    """Return texts (samples, LENGTH), with words mostly of one class, and their classes."""
    labels = rng.integers(0, CLASSES, samples)
    off = rng.random((samples, LENGTH)) < 0.4
    classes = np.where(off, rng.integers(0, CLASSES, off.shape), labels[:, None])
    return classes + CLASSES * rng.integers(0, WORDS // CLASSES, off.shape), labels


def train(embedding: RemoteModule, steps: int, batch: int) -> list[float]:
    """Train, on a trainer; return the losses."""
    rank = dist.get_rank()
    trainers = list(range(dist.get_world_size() - 1))
    group = dist.new_group(trainers, use_local_synchronization=True)
    rng = np.random.default_rng(1)
    dense = nn.Sequential(
        Mean(), nn.Linear(COLUMNS, 32, rng=rng), nn.ReLU(), nn.Linear(32, CLASSES, rng=rng)
    )
    model = DistributedDataParallel(dense, group)
    local = [rpc.RRef(parameter) for parameter in model.parameters()]
    # Several trainers step the embedding, one after the other.
    params = [*embedding.remote_parameters(), *local]
    optimizer = DistributedOptimizer(optim.SGD, params, lr=2.0)
    texts = np.random.default_rng([2, rank])
    losses: list[float] = []
    for _ in range(steps):
        words, labels = draw(texts, batch)
        with dist_autograd.context() as context_id:
            logits = dist_autograd.forward(model, embedding(words))
            loss = dist_autograd.forward(nn.CrossEntropyLoss(), logits, labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(float(loss))
    return losses


def run(steps: int, batch: int = 64) -> list[float]:
    """Train with all ranks of the job; return the trainers' mean losses by step."""
    rank, server = dist.get_rank(), dist.get_world_size() - 1
    rpc.init_rpc(f"trainer{rank}" if rank < server else "server")
    means: list[float] = []
    if rank == server:
        rng = np.random.default_rng(0)
        embedding = RemoteModule("server", nn.Embedding, (WORDS, COLUMNS), {"rng": rng})
        calls = [
            rpc.rpc_async(trainer, train, (embedding, steps, batch), timeout=0)
            for trainer in range(server)
        ]
        means = np.mean(rpc.wait_all(calls), axis=0).tolist()
        for step in range(0, steps, max(steps // 8, 1)):
            print(f"step {step:3}: loss {means[step]:.3f}")
        print(f"step {steps - 1:3}: loss {means[-1]:.3f}")
    rpc.shutdown()
    return means


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    dist.init_process_group()
    run(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
