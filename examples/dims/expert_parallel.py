"""Expert parallel training in JAX: each rank has some experts, and its own tokens.

    meshrun --nproc-per-node 2 examples/dims/expert_parallel.py

A router sends each token to two of eight small networks. The token travels to the network's rank,
and the result travels back. Here a token is an image of a handwritten digit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import meshlib as dist
from meshlib import jit as mj
from parallel.jax import balance_loss, grouped_matmul, mixture, route

Params = dict[str, Any]
EXPERTS, TOP_K, WIDTH, HIDDEN, STEPS = 8, 2, 64, 32, 50


def init(rng: np.random.Generator) -> Params:
    """Return the whole initial parameters, the same on all ranks."""
    shapes = {"up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    shapes |= {"router": (WIDTH, EXPERTS), "head": (WIDTH, 10)}
    return {
        name: rng.normal(size=shape, scale=shape[-2] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def loss_fn(params: Params, x: jax.Array, y: jax.Array, ep: dist.DeviceMesh | None) -> jax.Array:
    """Return the mean cross-entropy of this rank's images, and the weighted balance loss."""

    def networks(rows: jax.Array, counts: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(grouped_matmul(rows, params["up"], counts))
        return grouped_matmul(hidden, params["down"], counts)

    routes = route(x, params["router"], TOP_K)
    x = x + mixture(networks, x, routes.weights, routes.chosen, EXPERTS, ep)
    loss = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], y).mean()
    return loss + 0.01 * balance_loss(routes, ep)


def average(tree: Params, ep: dist.DeviceMesh) -> Params:
    """Average the gradients. Those of experts already have contributions from all ranks' tokens."""
    return {
        name: grad / ep.size()
        if name in ("up", "down")
        else mj.all_reduce(grad, dist.ReduceOp.AVG, ep)
        for name, grad in tree.items()
    }


def train(params: Params, x: np.ndarray, y: np.ndarray, ep: dist.DeviceMesh | None) -> list[float]:
    """Train on this rank's images; return the losses."""
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, jnp.asarray(x), y, ep)
        grads = grads if ep is None else average(grads, ep)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Train with experts over all ranks, then in one process."""
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("ep",))
    ep, whole = mesh["ep"], init(np.random.default_rng(0))
    rank, here, count = ep.get_local_rank(), EXPERTS // ep.size(), 1024 // ep.size()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    experts = {name: whole[name][rank * here : (rank + 1) * here] for name in ("up", "down")}
    own = slice(rank * count, (rank + 1) * count)
    losses = train(whole | experts, images[own], labels[own], ep)
    mean = ep.all_reduce(np.array(losses), op=dist.ReduceOp.AVG)
    if rank == 0:
        alone = train(whole, images[:1024], labels[:1024], None)
        for step in range(9, STEPS, 10):
            print(f"step {step + 1}: loss {mean[step]:.4f}, one process {alone[step]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
