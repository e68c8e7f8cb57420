"""A recurrent network whose embedding and output layer live on another worker than its cell.

    meshrun --nproc-per-node 2 examples/rpc/split_rnn.py

Rank 0 has the cell (a GRU, Cho et al., arXiv:1406.1078) and reads a part of a text in each step.
Rank 1 has the table of letters, and predicts the next letter. In each step values travel between
the ranks, and gradients travel back. Each rank updates its own weights. Needs JAX and optax.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshlib as dist
from meshlib import rpc
from parallel.rpc import DistributedOptimizer, Weights, dist_autograd

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the quick brown dog. "
LETTERS = sorted(set(TEXT))
COLUMNS, HIDDEN = 16, 48


@dist_autograd.function
@jax.jit
def embed(table: Any, letters: Any) -> Any:
    """Return the rows of letters (samples, length)."""
    return table[letters]


@dist_autograd.function
@jax.jit
def read(cell: Any, rows: Any) -> Any:
    """Return the cell's states after each of the rows (samples, length, columns)."""

    def step(state: Any, row: Any) -> tuple[Any, Any]:
        both = jnp.concatenate([state, row], axis=-1)
        reset, update = jnp.split(jax.nn.sigmoid(both @ cell["gates"]), 2, axis=-1)
        new = jnp.tanh(jnp.concatenate([reset * state, row], axis=-1) @ cell["new"])
        state = update * state + (1 - update) * new
        return state, state

    begin = jnp.zeros((rows.shape[0], HIDDEN), rows.dtype)
    return jax.lax.scan(step, begin, rows.swapaxes(0, 1))[1].swapaxes(0, 1)


@dist_autograd.function
@jax.jit
def loss_of(output: Any, states: Any, following: Any) -> Any:
    """Return the mean cross-entropy of the letters that follow."""
    logits = jax.nn.log_softmax(states @ output)
    return -jnp.take_along_axis(logits, following[..., None], axis=-1).mean()


def make(seed: int, *shapes: tuple[int, int]) -> list[Any]:
    """Return random float32 arrays of these shapes."""
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(0, rows**-0.5, (rows, columns)), jnp.float32)
        for rows, columns in shapes
    ]


def make_ends() -> tuple[rpc.RRef[Weights], rpc.RRef[Weights]]:
    """Make the weights of the worker "letters" there; return references to them."""
    table, output = make(1, (len(LETTERS), COLUMNS), (HIDDEN, len(LETTERS)))
    return rpc.RRef(Weights(table)), rpc.RRef(Weights(output))


def run(steps: int, samples: int = 16, length: int = 24) -> list[float]:
    """Train on two ranks; return the losses, on rank 0."""
    rpc.init_rpc(("reader", "letters")[dist.get_rank()])
    losses: list[float] = []
    if dist.get_rank() == 0:
        table, output = rpc.rpc_sync("letters", make_ends)
        both = COLUMNS + HIDDEN
        gates, new = make(0, (both, 2 * HIDDEN), (both, HIDDEN))
        cell = rpc.RRef(Weights({"gates": gates, "new": new}))
        optimizer = DistributedOptimizer(optax.adam, [table, cell, output], 1e-2)
        text = np.array([LETTERS.index(letter) for letter in TEXT * 4])
        rng = np.random.default_rng(0)
        for step in range(steps):
            begins = rng.integers(0, len(TEXT), samples)
            part = np.stack([text[begin : begin + length + 1] for begin in begins])
            with dist_autograd.context() as context_id:
                rows = rpc.rpc_sync("letters", embed, (table, part[:, :-1]))
                states = read(cell, rows)
                loss = rpc.rpc_sync("letters", loss_of, (output, states, part[:, 1:]))
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(float(loss))
            if step % max(steps // 6, 1) == 0 or step == steps - 1:
                print(f"step {step:3}: loss {losses[-1]:.3f}")
    rpc.shutdown()
    return losses


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()
    dist.init_process_group()
    run(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
