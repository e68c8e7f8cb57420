"""Context parallel training in JAX: each rank has a part of every sequence.

    meshrun --nproc-per-node 2 examples/dims/context_parallel.py

Attention is the only layer that needs other positions: ``ring_attention`` passes keys and values
from rank to rank. Gradients are averaged over the ranks as in data parallel training. The second
half of a sequence repeats the first half, so only attention can predict it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import meshlib as dist
from parallel.jax import (
    DistributedDataParallel,
    ring_attention,
    sequence_positions,
    split_sequence,
)

Params = dict[str, np.ndarray]
Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
VOCABULARY, LENGTH, WIDTH, HEADS, STEPS = 16, 64, 64, 4, 100


def init(rng: np.random.Generator) -> Params:
    """Return the initial parameters, the same on all ranks."""
    shapes = dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))
    shapes |= {
        "tokens": (VOCABULARY, WIDTH),
        "places": (LENGTH, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    scale = {"tokens": 0.5, "places": 0.5}
    return {
        name: rng.normal(size=shape, scale=scale.get(name, WIDTH**-0.5)).astype(np.float32)
        for name, shape in shapes.items()
    }


def loss_fn(
    params: Params, tokens: Any, targets: Any, places: Any, attention: Attention
) -> jax.Array:
    """Return the mean cross-entropy of the next tokens, at the positions ``places``."""
    x = params["tokens"][tokens] + params["places"][places]
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], HEADS, -1) for name in "qkv")
    x = x + attention(q, k, v).reshape(x.shape) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets).mean()


def train(params: Params, gradients: Any, split: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """Train; return the losses. ``split`` selects this rank's positions of whole sequences."""
    optimizer, rng = optax.adam(1e-2), np.random.default_rng(1)
    state, losses = optimizer.init(params), []

    @jax.jit
    def step(
        params: Params, state: Any, tokens: Any, targets: Any
    ) -> tuple[Params, Any, jax.Array]:
        loss, grads = gradients(params, tokens, targets)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(STEPS):
        half = rng.integers(0, VOCABULARY, (16, LENGTH // 2))
        tokens = np.concatenate([half, half, half[:, :1]], axis=1)
        params, state, loss = step(params, state, split(tokens[:, :-1]), split(tokens[:, 1:]))
        losses.append(float(loss))
    return losses


def main() -> None:
    """Train with split sequences, then with whole sequences in one process."""
    mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("cp",))
    cp, params = mesh["cp"], init(np.random.default_rng(0))
    places = sequence_positions(LENGTH // cp.size(), cp)
    own = partial(loss_fn, places=places, attention=partial(ring_attention, mesh=cp))
    ddp = DistributedDataParallel(params, cp)
    losses = train(ddp.params, ddp.value_and_grad(own), partial(split_sequence, mesh=cp))
    mean = cp.all_reduce(np.array(losses), op=dist.ReduceOp.AVG)  # of all positions
    if dist.get_rank() == 0:
        attention = partial(jax.nn.dot_product_attention, is_causal=True)
        whole = partial(loss_fn, places=np.arange(LENGTH), attention=attention)
        alone = train(params, jax.value_and_grad(whole), lambda tokens: tokens)
        for step in range(19, STEPS, 20):
            print(f"step {step + 1}: loss {mean[step]:.4f}, one process {alone[step]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
