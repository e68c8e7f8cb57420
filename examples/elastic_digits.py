"""Elastic training: it continues when ranks are killed, and replaces them.

    meshrun --mesh dp=4 --replace 10 examples/elastic_digits.py

The program prints the process numbers: `kill -9` one of them, or pass `--lose RANK:STEP`. The
result is the same as without a loss.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np
from support.digits import load_digits

import meshlib as dist
from parallel import DistributedDataParallel, nn, optim
from parallel.elastic import ElasticBatches, ElasticMesh


def main() -> None:
    """Train a small network on handwritten digits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--batch-size", type=int, default=128, help="samples per step on all ranks together"
    )
    parser.add_argument("--lose", default="", metavar="RANK:STEP", help="kill a rank at a step")
    args = parser.parse_args()
    rank = int(os.environ["RANK"])  # a replacement has a new number

    dist.init_process_group(timeout=30)
    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    images, labels = load_digits()
    images = (images / 16).astype(np.float32)
    train, test = np.split(np.random.default_rng(0).permutation(len(labels)), [1437])
    print(f"rank {rank} is process {os.getpid()}", flush=True)

    with ElasticMesh(mesh, dim="dp") as elastic:
        rng = np.random.default_rng(1)
        net = nn.Sequential(nn.Linear(64, 128, rng=rng), nn.ReLU(), nn.Linear(128, 10, rng=rng))
        model = DistributedDataParallel(net, elastic.mesh["dp"])
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        loss_function = nn.CrossEntropyLoss()
        state = {"model": model, "optimizer": optimizer}
        batches = ElasticBatches(len(train), args.batch_size)

        for step in elastic.steps(state, args.steps, batches=batches):
            with step as mesh:
                if args.lose == f"{rank}:{step.number}":
                    os.kill(os.getpid(), signal.SIGKILL)
                batch = train[step.share.samples]
                loss = loss_function(model(images[batch]), labels[batch])
                model.backward(step.share.weight * loss_function.backward())
                step.on_commit(optimizer.step)
                step.on_commit(optimizer.zero_grad)
            if step.committed and step.number % 50 == 0 and mesh.get_local_rank() == 0:
                print(f"step {step.number:3}: loss {loss:.4f} on {mesh.size()} ranks", flush=True)

        if elastic.placed and mesh.get_local_rank() == 0:
            model.eval()
            correct = (model(images[test]).argmax(axis=-1) == labels[test]).sum()
            print(f"test accuracy {correct / len(test):.1%} after {elastic.epoch} changes")


if __name__ == "__main__":
    main()
