"""A training run on a mesh: the model's stage of this rank, and what a step does."""

from __future__ import annotations

import math

import numpy as np

import meshlib as dist
from gpt.config import Config, Schedule
from gpt.data import Batches
from gpt.dims import Dims
from gpt.model import make_stage, names_of
from gpt.split import split_stage
from meshlib import DeviceMesh
from parallel import FSDPModule, clip_grad_norm_, nn, optim


class Trainer:
    """The model of ``config`` on ``mesh``. Raises ValueError for what does not fit together."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.config = config
        self.dims = dims = Dims(mesh)
        config.check(dims.sizes)
        stages = names_of(config.model, dims.sizes.pp)
        names = stages[dims.pp.process_group.rank()]
        stage = make_stage(config, names, dims)
        self.stage = split_stage(stage, config, dims)
        options = config.optimizer
        self.optimizer = optim.AdamW(
            self.stage.parameters(),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )
        self.loss = nn.CrossEntropyLoss()
        self.batches = Batches(config, dims, np.arange(config.model.context))

    def step(self, number: int) -> float:
        """Do step ``number``, counted from 0; return the loss of the batch, on every rank."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * lr_factor(self.config.schedule, number)
        self.optimizer.zero_grad()
        loss = self._forward_and_backward(*self.batches.at(number))
        clip_grad_norm_(self.stage.parameters(), self.config.optimizer.clip, mesh=self.dims.pp)
        self.optimizer.step()
        return float(self.dims.tokens.all_reduce(np.array([loss]), op=dist.ReduceOp.AVG)[0])

    def _forward_and_backward(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        """Compute the gradients of this rank's share, microbatch by microbatch; return its loss."""
        count = self.config.data.microbatches
        total = 0.0
        pieces = zip(np.split(inputs, count), np.split(targets, count), strict=True)
        for number, (x, y) in enumerate(pieces, 1):
            if isinstance(self.stage, FSDPModule):
                self.stage.set_requires_gradient_sync(number == count)
            total += self.loss(self.stage(x), y) / count
            self.stage.backward(self.loss.backward(1 / count))
        return total


def lr_factor(schedule: Schedule, step: int) -> float:
    """Return the share of the learning rate in a step: a ramp, then half a cosine to ``final``."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(schedule.steps - schedule.warmup, 1)
    return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2
