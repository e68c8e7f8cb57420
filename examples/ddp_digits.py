"""Data parallel training in one page: wrap the model, share the data, train.

    meshrun --mesh dp=2 examples/ddp_digits.py

It runs on any mesh. Each rank has the whole model and its share of the data; gradients are averaged
over the ranks while the backward pass runs.
"""

from __future__ import annotations

import argparse

import numpy as np
from support.digits import load_digits

import meshlib as dist
from parallel import DistributedDataParallel, DistributedSampler, nn, optim


def main() -> None:
    """Train a small network on handwritten digits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    args = parser.parse_args()

    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    rng = np.random.default_rng(0)
    images, labels = load_digits()
    images = (images / 16).astype(np.float32)
    train, test = np.split(rng.permutation(len(labels)), [1437])

    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(64, 128, rng=rng),
            nn.ReLU(),
            nn.Linear(128, 10, rng=rng),
        ),
        mesh,
    )
    sampler = DistributedSampler(train, mesh=mesh)
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    loss_function = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        share = train[list(sampler)]
        losses = []
        for begin in range(0, len(share), args.batch_size):
            batch = share[begin : begin + args.batch_size]
            optimizer.zero_grad()
            losses.append(loss_function(model(images[batch]), labels[batch]))
            model.backward(loss_function.backward())
            optimizer.step()
        mean = mesh.all_reduce(np.array(np.mean(losses)), op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {mean:.4f}")

    # Each rank has its share of the test images, and the ranks sum their counts.
    model.eval()
    share = test[list(DistributedSampler(test, mesh=mesh, evaluation=True))]
    correct = np.array((model(images[share]).argmax(axis=-1) == labels[share]).sum())
    mesh.all_reduce(correct)
    if dist.get_rank() == 0:
        print(f"test accuracy {correct / len(test):.1%} on {mesh.size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
