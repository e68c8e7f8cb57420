"""Train a GPT in JAX on the source of Python's standard library, on any mesh; see ``gpt.toml``.

    meshrun --mesh pp=2,dp_shard=2,tp=2 examples/gpt --config examples/gpt/gpt.toml

The six dims are pp, dp_replicate, dp_shard, cp, tp and ep; dims that the mesh does not name have
one rank. The losses are the same on every mesh. A checkpoint loads on any other mesh.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gpt_config import Config
from gpt_trainer import Trainer

import meshlib as dist
from meshlib.checkpoint import Checkpointer


def train(trainer: Trainer, folder: str = "", stop_after: int | None = None) -> list[float]:
    """Train, resuming from the newest checkpoint in ``folder``; return the losses of all steps."""
    config = trainer.config
    run, tokens = config.run, config.data.batch_size * config.model.context
    files = Checkpointer(folder, keep_last=run.keep) if folder else None
    losses: list[float] = []
    if files is not None and files.latest() is not None:
        loaded = files.load({"training": trainer.states.layout(trainer.tree), "losses": ...})
        trainer.take(*trainer.states.restore(trainer.tree, loaded["training"]))
        losses = loaded["losses"].tolist()
    last, since = len(losses) + 1, time.monotonic()
    for number in range(len(losses), run.steps if stop_after is None else stop_after):
        losses.append(trainer.step(number))
        now = time.monotonic()
        if number + 1 == last:  # this step included compilation
            since = now
        elif dist.get_rank() == 0 and (number + 1) % 10 == 0:
            speed = (number + 1 - last) * tokens / (now - since)
            print(f"step {number + 1}: loss {losses[-1]:.4f}, {speed:,.0f} tokens a second")
        if files is not None and len(losses) % run.every == 0:
            state = trainer.states.state(trainer.tree)
            files.save({"training": state, "losses": np.array(losses)}, step=len(losses))
    jax.block_until_ready(trainer.tree)  # no rank may leave before the last update's calls end
    if files is not None:
        files.close()
    return losses


def make_step(path: Path, mesh: dist.DeviceMesh) -> Callable[[], dict[str, Any]]:
    """Return a step for ``meshlib explain estimate``; it returns the arrays of this rank."""
    config = Config(path)
    jax.config.update("jax_enable_x64", config.run.dtype == "float64")
    trainer = Trainer(config, mesh)

    def step() -> dict[str, Any]:
        trainer.step(0)
        params, state = jax.block_until_ready(trainer.tree)
        gradients = [stage.grads for stage in trainer.stages]
        return {"parameters": params, "gradients": gradients, "optimizer": state}

    return step


def main() -> None:
    """Read the config, train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("gpt.toml"))
    parser.add_argument("--checkpoints", default="", help="save here, and resume from here")
    parser.add_argument("--stop-after", type=int, help="stop after this many steps")
    parser.add_argument("--losses", type=Path, help="write the losses into this file")
    args = parser.parse_args()
    config = Config(args.config)
    jax.config.update("jax_enable_x64", config.run.dtype == "float64")
    mesh = dist.init_device_mesh()  # the mesh of `meshrun --mesh`
    losses = train(Trainer(config, mesh), args.checkpoints or config.run.folder, args.stop_after)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    if first:
        start, end = losses[0], losses[-1]
        print(f"{len(losses)} steps on {mesh.described()}: loss {start:.4f} -> {end:.4f} nats")
        if args.losses:
            np.savetxt(args.losses, losses, "%.17g")


if __name__ == "__main__":
    main()
