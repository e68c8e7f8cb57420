"""Data parallel training with JAX in one page: the whole step is jitted, with communication.

    meshrun --mesh dp=2 examples/dims/data_parallel.py

It runs on any mesh. Each rank has all parameters and its share of the data. Inside the jitted step
the gradients are averaged over the ranks, each bucket as soon as XLA has computed it.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import meshlib as dist
from parallel import DistributedBatchSampler, DistributedSampler
from parallel.jax import DistributedDataParallel


def init(key: jax.Array, sizes: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    """Return the parameters of a network with layers of these sizes."""
    pairs = list(pairwise(sizes))
    return [
        {"w": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for key, (n, m) in zip(jax.random.split(key, len(pairs)), pairs, strict=True)
    ]


def apply(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Return the logits for images (n, 64)."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def loss_fn(params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


def main() -> None:
    """Train a small network on handwritten digits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    args = parser.parse_args()

    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = np.split(np.random.default_rng(0).permutation(len(labels)), [1437])

    ddp = DistributedDataParallel(init(jax.random.key(0), (64, 128, 10)), mesh)
    optimizer = optax.adam(2e-3)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = ddp.value_and_grad(loss_fn)(params, x, y)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params, state = ddp.params, optimizer.init(ddp.params)
    batches = DistributedBatchSampler(
        DistributedSampler(train, mesh=mesh), args.batch_size, drop_last=True
    )
    for epoch in range(args.epochs):
        losses = []
        for batch in batches:
            chosen = train[batch.indices]
            params, state, loss = step(params, state, images[chosen], labels[chosen])
            losses.append(loss)
        mean = mesh.all_reduce(np.array(np.mean(losses)), op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {mean:.4f}")

    # Each rank has its share of the test images, and the ranks sum their counts.
    share = test[list(DistributedSampler(test, mesh=mesh, evaluation=True))]
    right = int((apply(params, images[share]).argmax(-1) == labels[share]).sum())
    right = mesh.all_reduce(np.array(right))
    if dist.get_rank() == 0:
        accuracy = right / len(test)
        print(f"test accuracy {accuracy:.1%} on {mesh.size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
