"""Tensor parallel training in JAX: each rank has a part of each layer's features.

    meshrun --nproc-per-node 2 examples/dims/tensor_parallel.py

The model is written for one process. A plan maps paths of weights to splits by columns or by rows.
A pair of layers then costs one all-reduce forward and one backward.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import meshlib as dist
from parallel import ColwiseParallel, RowwiseParallel
from parallel.jax import parallelize

Params = dict[str, Any]


def init(rng: np.random.Generator, width: int = 64, hidden: int = 256, blocks: int = 2) -> Params:
    """Return the whole initial parameters, the same on all ranks."""

    def draw(rows: int, columns: int) -> np.ndarray:
        return rng.normal(size=(rows, columns), scale=rows**-0.5).astype(np.float32)

    made = [{"up": draw(width, hidden), "down": draw(hidden, width)} for _ in range(blocks)]
    return {"blocks": made, "head": draw(width, 10)}


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy, with whole or with split weights."""
    for block in params["blocks"]:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], y).mean()


def train(params: Params, steps: int = 50) -> list[float]:
    """Train on handwritten digits; return the losses."""
    images, labels = load_digits(return_X_y=True)
    images = jnp.asarray(images / 16, jnp.float32)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Train with split weights, then with whole weights in one process."""
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("tp",))
    whole = init(np.random.default_rng(0))
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    losses = train(parallelize(whole, mesh["tp"], plan))
    if dist.get_rank() == 0:
        alone = train(whole)
        for step in range(9, len(losses), 10):
            print(f"step {step + 1}: loss {losses[step]:.4f}, one process {alone[step]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
