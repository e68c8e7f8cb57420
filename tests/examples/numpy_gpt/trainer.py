"""A training run on a mesh: this rank's stages of the model, and what a step does."""

from __future__ import annotations

import math

import numpy as np

import meshlib as dist
from meshlib import DeviceMesh
from numpy_gpt.config import Config, Schedule
from numpy_gpt.data import Batches
from numpy_gpt.dims import Dims
from numpy_gpt.model import make_stage, names_of
from numpy_gpt.split import split_stage
from parallel import VocabParallelCrossEntropyLoss, clip_grad_norm_, nn, optim
from parallel.context import sequence_positions
from parallel.pipeline import PipelineStage, StageLayers, get_schedule_class


class Trainer:
    """The model of ``config`` on ``mesh``. Raises ValueError for what does not fit together."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.config = config
        self.dims = dims = Dims(mesh)
        config.check(dims.sizes)
        schedule = get_schedule_class(config.parallel.pipeline)
        pipeline, settings = dims.pp.process_group, config.parallel
        count = config.data.microbatches
        table = schedule.make_table(pipeline.size(), count, settings.stages_per_rank)
        names = names_of(config.model, table.stages)
        own = [stage for stage, rank in enumerate(table.rank_of) if rank == pipeline.rank()]
        parts = [split_stage(make_stage(config, names[i], dims), config, dims) for i in own]
        self.model = StageLayers([named for part in parts for named in part.named_children()])
        """All that this rank has of the model."""
        loss = (
            VocabParallelCrossEntropyLoss(dims.tp) if dims.sizes.tp > 1 else nn.CrossEntropyLoss()
        )
        self.stages = [
            PipelineStage(part, i, table.stages, dims.pp)
            for i, part in zip(own, parts, strict=True)
        ]
        self.schedule = schedule(self.stages, count, loss)
        options = config.optimizer
        self.optimizer = optim.AdamW(
            self.model.parameters(),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
        )
        places = sequence_positions(
            config.model.context // dims.sizes.cp,
            dims.cp,
            zigzag=dims.sizes.cp > 1 and config.parallel.attention == "ring",
        )
        self.batches = Batches(config, dims, places)

    def step(self, number: int) -> float:
        """Do step ``number``, counted from 0; return the loss of the batch, on every rank."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.optimizer.lr * lr_factor(self.config.schedule, number)
        self.optimizer.zero_grad()
        inputs, targets = self.batches.at(number)
        losses: list[float] = []  # those of the microbatches, where the last stage is
        self.schedule.step(inputs, target=targets, losses=losses, return_outputs=False)
        clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip, mesh=self.dims.pp)
        self.optimizer.step()
        total = self.dims.pp.all_reduce(np.array([sum(losses) / self.config.data.microbatches]))
        return float(self.dims.tokens.all_reduce(total, op=dist.ReduceOp.AVG)[0])


def lr_factor(schedule: Schedule, step: int) -> float:
    """Return the share of the learning rate in a step: a ramp, then half a cosine to ``final``."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(schedule.steps - schedule.warmup, 1)
    return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * done)) / 2
