"""A training run on a mesh: this rank's stages, a step, the state for checkpoints."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from gpt_config import Config, Dims
from gpt_model import Stage, make_stage, names_of

import meshlib as dist
from meshlib import DeviceMesh
from meshlib import jit as mj
from parallel.jax import PipelineStage, StageStates, fsdp, vocab_parallel_cross_entropy
from parallel.pipeline import get_schedule_class

Tree = Any


@cache
def read_library(characters: int) -> npt.NDArray[np.uint8]:
    """Return the first characters of the standard library's modules, as ASCII codes (n,)."""
    pieces, total = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        pieces.append(path.read_text("ascii", errors="ignore"))
        total += len(pieces[-1])
        if total >= characters:
            break
    return np.frombuffer("".join(pieces)[:characters].encode("ascii"), np.uint8)


class Trainer:
    """Trains the model of ``config`` on ``mesh``. Raises ValueError if the two do not fit."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.config, self.dims = config, Dims(mesh)
        dims, count = self.dims, config.data.microbatches
        config.check(dims)
        schedule = get_schedule_class(config.parallel.pipeline)
        table = schedule.make_table(dims.pp.size(), count, config.parallel.stages_per_rank)
        names = names_of(config.model.layers, table.stages)
        own = [i for i, rank in enumerate(table.rank_of) if rank == dims.pp.get_local_rank()]
        self.compute = Stage(config, dims)
        parts = [make_stage(config, names[i], dims) for i in own]
        self.stages = [
            PipelineStage(self.compute, part, i, table.stages, dims.pp)
            for i, part in zip(own, parts, strict=True)
        ]

        def loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
            return vocab_parallel_cross_entropy(logits, targets, dims.tp).mean()

        self.schedule = schedule(self.stages, count, loss)
        options, run = config.optimizer, config.run
        lr = optax.warmup_cosine_decay_schedule(
            options.lr / max(run.warmup, 1),
            options.lr,
            run.warmup,
            max(run.steps, run.warmup + 1),
            options.lr * run.final,
        )
        betas = (options.beta1, options.beta2)
        self.optimizer = optax.adamw(lr, *betas, weight_decay=options.weight_decay)
        self.state = self.optimizer.init(self.params)
        self._update = jax.jit(self._updated)
        self.states = StageStates(dims.mesh)
        replicas, rows = dims.sequences, np.arange(config.data.batch_size).reshape(count, -1)
        share = rows.shape[1] // replicas.size()
        begin = dist.get_rank(replicas) * share
        self._rows = rows[:, begin : begin + share].reshape(-1)

    @property
    def params(self) -> Tree:
        """This rank's share of the parameters: the parts of its stages, by name."""
        return merged([stage.params for stage in self.stages])

    @property
    def tree(self) -> tuple[Tree, Tree]:
        """This rank's share of the training state: parameters, and the optimizer's state."""
        return self.params, self.state

    def batch(self, step: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return this rank's inputs and targets of a step, each of shape (sequences, length).

        Microbatch m has the m-th part of the step's sequences on any mesh. Each rank of
        ``dims.sequences`` has an equal share of a microbatch, and along cp a part of each sequence.
        """
        text, context = read_library(self.config.data.characters), self.config.model.context
        rng = np.random.default_rng([self.config.run.seed, step])
        starts = rng.integers(0, len(text) - context - 1, self.config.data.batch_size)
        windows = starts[self._rows][:, None] + self.compute.places
        return text[windows].astype(np.int32), text[windows + 1].astype(np.int32)

    def step(self, number: int) -> float:
        """Run step ``number``, counted from 0; return the batch's loss, on every rank."""
        for stage in self.stages:
            stage.zero_grad()
        inputs, targets = self.batch(number)
        losses: list[float] = []  # of the microbatches, on ranks with the last stage
        self.schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
        grads = merged([stage.grads for stage in self.stages])
        self.take(*self._update(*self.tree, grads))
        total = self.dims.pp.all_reduce(np.array([sum(losses) / self.config.data.microbatches]))
        return float(self.dims.tokens.all_reduce(total, op=dist.ReduceOp.AVG)[0])

    def take(self, params: Tree, state: Tree) -> None:
        """Replace the parameters and the state of the optimizer."""
        self.state = state
        for stage in self.stages:
            own = {name: part for name, part in params.items() if name in stage.params}
            blocks = {name: params["blocks"][name] for name in stage.params["blocks"]}
            stage.params = own | {"blocks": blocks}

    def _updated(self, params: Tree, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        def of_one(path: Any, grad: jax.Array) -> jax.Array:
            # Tokens of all ranks of ep have contributed to an expert's gradient.
            experts = "experts" in jax.tree_util.keystr(path)
            return grad / self.dims.ep.size() if experts else grad

        grads = jax.tree_util.tree_map_with_path(of_one, grads)
        norm = jnp.sqrt(mj.all_reduce(fsdp.global_norm(grads) ** 2, group=self.dims.pp))
        factor = jnp.minimum(1, self.config.optimizer.clip / (norm + 1e-6))
        grads = jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads)
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state


def merged(parts: list[Tree]) -> Tree:
    """Return the parts of several stages as one tree."""
    blocks = {name: block for part in parts for name, block in part["blocks"].items()}
    return {name: leaf for part in parts for name, leaf in part.items()} | {"blocks": blocks}
