"""Data parallel training in which ranks run out of inputs at different times.

    meshrun --mesh dp=3 examples/uneven_inputs.py

It runs on any mesh. Each rank has its own images, and some ranks have three times as many as
others. Without ``join`` the other ranks would wait for the first rank to finish. With ``join``,
that rank takes part in their calls until all are done. The loop also uses gradient accumulation, a
sharded optimizer, and a collective of its own.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import numpy as np
from support.digits import load_digits

import meshlib as dist
from parallel import DistributedDataParallel, ZeroRedundancyOptimizer, nn, optim

BATCH = 32
ACCUMULATE = 2  # microbatches per step


def own_images(rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return this rank's training images and labels, and the common test images and labels."""
    images, labels = load_digits()
    images = (images / 16).astype(np.float32)
    train, test = np.split(np.random.default_rng(0).permutation(len(labels)), [1437])
    # Rank r has r + 1 parts of the 1 + 2 + … parts.
    ends = len(train) * np.cumsum(np.arange(ranks) + 1) // (ranks * (ranks + 1) // 2)
    own = np.split(train, ends[:-1])[rank]
    return images[own], labels[own], images[test], labels[test]


def main() -> None:
    """Train a small network on unevenly spread handwritten digits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    rank, ranks = mesh.get_rank(), mesh.size()
    images, labels, test_images, test_labels = own_images(rank, ranks)
    steps = len(labels) // (BATCH * ACCUMULATE)
    lines = [""] * ranks
    mesh.all_gather_object(lines, f"rank {rank}: {len(labels)} images, {steps} steps an epoch")
    if rank == 0:
        print(*lines, sep="\n")

    rng = np.random.default_rng(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128, rng=rng), nn.ReLU(), nn.Linear(128, 10, rng=rng)),
        mesh,
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, mesh, lr=3e-3)
    loss_function = nn.CrossEntropyLoss()
    order = np.random.default_rng(rank)

    for epoch in range(args.epochs):
        shuffled = order.permutation(len(labels))
        totals = np.zeros(2)  # images, and the sum of their losses, over all ranks
        with model.join(divide_by_initial_world_size=False, optimizer=optimizer):
            for step in range(steps):
                optimizer.zero_grad()
                total = 0.0
                for micro in range(ACCUMULATE):
                    begin = (step * ACCUMULATE + micro) * BATCH
                    chosen = shuffled[begin : begin + BATCH]
                    with nullcontext() if micro == ACCUMULATE - 1 else model.no_sync():
                        total += loss_function(model(images[chosen]), labels[chosen])
                        model.backward(loss_function.backward(1 / ACCUMULATE))
                optimizer.step()
                # Ranks without images contribute zero to this sum.
                totals += mesh.all_reduce(np.array([BATCH * ACCUMULATE, BATCH * total]))
        # A rank that stopped early lacks the last sums; the largest sums are those of the epoch.
        totals = mesh.all_reduce(totals, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"epoch {epoch + 1:2}: {totals[0]:.0f} images, loss {totals[1] / totals[0]:.4f}")

    flat = np.concatenate([parameter.data.reshape(-1) for parameter in model.parameters()])
    low, high = (
        mesh.all_reduce(flat.copy(), op=op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    )
    correct = (model.eval()(test_images).argmax(axis=-1) == test_labels).mean()
    if rank == 0:
        same = "the same bits" if np.array_equal(low, high) else "DIFFERENT parameters"
        print(f"all {ranks} ranks have {same}; test accuracy {correct:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
