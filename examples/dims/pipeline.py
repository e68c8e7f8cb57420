"""Pipeline parallel training in JAX: each rank has some of the layers.

    meshrun --nproc-per-node 2 examples/dims/pipeline.py

A batch is cut into microbatches. While one is in the last stage, the first stage works on later
ones; the schedule 1F1B bounds the number under way. Other schedules accept the same stages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import meshlib as dist
from parallel.jax import PipelineStage
from parallel.pipeline import Schedule1F1B

Params = list[dict[str, Any]]
LAYERS, MICROBATCHES, STEPS = 4, 8, 50


def init(layer: int) -> dict[str, Any]:
    """Return the initial parameters of one layer, the same on any rank."""
    rng = np.random.default_rng(layer)
    return {"w": rng.normal(size=(64, 64), scale=0.1).astype(np.float32), "b": jnp.zeros(64)}


def apply(params: Params, x: jax.Array) -> jax.Array:
    """Map (n, 64) to (n, 64) by some of the layers; the last output begins with the ten logits."""
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def loss_fn(output: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the last stage's output."""
    return optax.softmax_cross_entropy_with_integer_labels(output[:, :10], labels).mean()


def train_stage(pp: dist.DeviceMesh, images: jax.Array, labels: np.ndarray) -> list[float]:
    """Train this rank's stage; return the losses, on every rank."""
    rank, size = pp.get_local_rank(), pp.size()
    own = range(rank * LAYERS // size, (rank + 1) * LAYERS // size)
    stage = PipelineStage(apply, [init(layer) for layer in own], rank, size, pp)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    optimizer = optax.adam(1e-3)
    state, means = optimizer.init(stage.params), []
    for _ in range(STEPS):
        stage.zero_grad()
        losses: list[float] = []  # of the microbatches, on the last rank
        schedule.step(images, target=labels, losses=losses, return_outputs=False)
        updates, state = optimizer.update(stage.grads, state)
        stage.params = optax.apply_updates(stage.params, updates)
        means.append(sum(losses) / MICROBATCHES)
    return pp.all_reduce(np.array(means)).tolist()


def train_whole(images: jax.Array, labels: np.ndarray) -> list[float]:
    """Train all layers in one process; return the losses."""
    params, optimizer = [init(layer) for layer in range(LAYERS)], optax.adam(1e-3)
    state, losses = optimizer.init(params), []

    @jax.jit
    def gradients(params: Params) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(lambda params: loss_fn(apply(params, images), labels))(params)

    for _ in range(STEPS):
        loss, grads = gradients(params)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def main() -> None:
    """Train on handwritten digits in stages, then in one process."""
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("pp",))
    images, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(images[:1792] / 16, jnp.float32), labels[:1792]
    losses = train_stage(mesh["pp"], images, labels)
    if dist.get_rank() == 0:
        alone = train_whole(images, labels)
        for step in range(9, STEPS, 10):
            print(f"step {step + 1}: loss {losses[step]:.4f}, one process {alone[step]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
