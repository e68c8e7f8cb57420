"""A model whose parts live on several workers, with several microbatches under way.

    meshrun --nproc-per-node 3 examples/rpc/pipeline.py

Rank 0 sends microbatches to the first part, and each part's outputs to the next one. The parts
work on different microbatches at the same time. (``parallel.pipeline`` has stages that send to each
other, and schedules that bound memory. This form suits parts that are chosen at run time.)
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import meshlib as dist
from meshlib import rpc
from parallel import nn, optim
from parallel.rpc import DistributedOptimizer, RemoteModule, dist_autograd


def make_part(number: int, parts: int) -> nn.Module:
    """Return one part of a network for digits; the last part returns logits."""
    rng = np.random.default_rng(number)
    columns = 64 if number < parts - 1 else 10
    linear = nn.Linear(64, columns, rng=rng)
    return nn.Sequential(linear, nn.ReLU()) if number < parts - 1 else linear


def forward(parts: list[RemoteModule], inputs: list[Any]) -> list[Any]:
    """Return the outputs for several microbatches, which pass through the parts concurrently."""
    under_way: list[Any] = [None] * len(inputs)
    for tick in range(len(inputs) + len(parts) - 1):
        # The last part goes first: its input was requested in the previous tick.
        for number, part in reversed(list(enumerate(parts))):
            i = tick - number
            if 0 <= i < len(inputs):
                value = inputs[i] if number == 0 else under_way[i].wait()
                under_way[i] = part.forward_async(value)
    return [one.wait() for one in under_way]


def run(epochs: int, batch: int = 128, microbatches: int = 4) -> float:
    """Train with all ranks of the job; on rank 0, return the test accuracy, from 0 to 1."""
    rpc.init_rpc(f"worker{dist.get_rank()}")
    right = 0.0
    if dist.get_rank() == 0:
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32)
        count = dist.get_world_size() - 1
        parts = [RemoteModule(1 + i, make_part, (i, count)) for i in range(count)]
        params = [param for part in parts for param in part.remote_parameters()]
        optimizer = DistributedOptimizer(optim.Adam, params, lr=3e-3)
        for epoch in range(epochs):
            total: list[float] = []
            for begin in range(0, 1500, batch):
                chosen = slice(begin, min(begin + batch, 1500))
                inputs = np.array_split(images[chosen], microbatches)
                targets = np.array_split(labels[chosen], microbatches)
                with dist_autograd.context() as context_id:
                    losses = [
                        dist_autograd.forward(nn.CrossEntropyLoss("sum"), output, target)
                        for output, target in zip(forward(parts, inputs), targets, strict=True)
                    ]
                    dist_autograd.backward(context_id, losses)
                    optimizer.step(context_id)
                total += [float(loss) for loss in losses]
            print(f"epoch {epoch + 1:2}: loss {sum(total) / 1500:.4f}")
        for part in parts:
            part.eval()
        (logits,) = forward(parts, [images[1500:]])
        right = float((logits.argmax(axis=-1) == labels[1500:]).mean())
        print(f"test accuracy {right:.1%}")
    rpc.shutdown()
    return right


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    dist.init_process_group()
    run(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
