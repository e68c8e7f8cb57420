"""Fully sharded training with JAX in one page: 1/n of parameters and states on each rank.

    meshrun --mesh dp_shard=2 examples/dims/fully_sharded.py
    meshrun --mesh dp_replicate=2,dp_shard=2 examples/dims/fully_sharded.py

The layers are stacked and run by ``jax.lax.scan``; a rank has one whole layer at a time. On a mesh
of two dims, parameters are replicated over the first and sharded over the second.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import meshlib as dist
from parallel import DistributedBatchSampler, DistributedSampler
from parallel.jax import fsdp

Params = dict[str, Any]


def init(rng: np.random.Generator, width: int, layers: int) -> Params:
    """Return the whole initial parameters, the same on all ranks."""
    hidden = rng.normal(size=(layers, width, width)) * (1 / width) ** 0.5
    return {
        "first": (rng.normal(size=(64, width)) * (2 / 64) ** 0.5).astype(np.float32),
        "hidden": {"w": hidden.astype(np.float32), "b": np.zeros((layers, width), np.float32)},
        "last": np.zeros((width, 10), np.float32),
    }


def hidden(params: Params, x: jax.Array) -> jax.Array:
    """Apply one of the stacked layers, with whole parameters."""
    return x + jax.nn.relu(x @ params["w"] + params["b"])


def apply(parts: Params, x: jax.Array) -> jax.Array:
    """Return the logits for images (n, 64), gathering each layer where it begins."""
    x = x @ fsdp.gather(parts["first"])
    layer = fsdp.layer(hidden)
    x, _ = jax.lax.scan(lambda x, part: (layer(part, x), None), x, parts["hidden"])
    return x @ fsdp.gather(parts["last"])


def loss_fn(parts: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(apply(parts, x), y).mean()


def main() -> None:
    """Train a small network on handwritten digits."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    args = parser.parse_args()

    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = np.split(np.random.default_rng(0).permutation(len(labels)), [1437])

    parts = fsdp.shard(init(np.random.default_rng(1), 64, 6), mesh, stacked=["hidden"])
    optimizer = optax.adam(2e-3)
    state = optimizer.init(parts)

    @jax.jit
    def step(parts, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(parts, x, y)
        scale = jnp.minimum(1, 1.0 / fsdp.global_norm(grads))  # clipping
        grads = jax.tree.map(partial(jnp.multiply, scale), grads)
        updates, state = optimizer.update(grads, state, parts)
        return optax.apply_updates(parts, updates), state, loss

    batches = DistributedBatchSampler(
        DistributedSampler(train, mesh=mesh), args.batch_size, drop_last=True
    )
    for epoch in range(args.epochs):
        losses = []
        for batch in batches:
            chosen = train[batch.indices]
            parts, state, loss = step(parts, state, images[chosen], labels[chosen])
            losses.append(loss)
        mean = mesh.all_reduce(np.array(np.mean(losses)), op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {mean:.4f}")

    # All ranks must gather together, so each computes all test images.
    right = int((jax.jit(apply)(parts, images[test]).argmax(-1) == labels[test]).sum())
    if dist.get_rank() == 0:
        print(f"test accuracy {right / len(test):.1%} on {mesh.size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
