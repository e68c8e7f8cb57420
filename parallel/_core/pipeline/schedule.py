"""``PipelineSchedule``: runs batches through the stages in the order of a table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

from meshlib import ProcessGroup
from parallel._arrays import Array
from parallel._checks import check_instance
from parallel._core.pipeline.executor import Microbatches, PipelineStep, cut
from parallel._core.pipeline.messages import RankPlan, StageShapes
from parallel._core.pipeline.simulation import ActionSpan, Timing
from parallel._core.pipeline.stage import SharedParameters, Stage, check_like, specs_of
from parallel._core.pipeline.table import Action, ScheduleTable
from parallel._core.replicas import check_same, describe_options, raise_on_all_ranks
from parallel._groups import gathered


class PipelineSchedule:
    """A schedule that runs batches through a pipeline in the order of any table.

    ``ScheduleGPipe`` and the other named schedules make their own table. All ranks must make the
    schedule: it compares their arguments, and raises one rank's argument error on all ranks.

    Args:
        stages: This rank's stage, or a list of its stages.
        table: The actions of each rank, in order.
        loss_fn: The loss of the last stage's output and the target: a ``parallel.nn`` module for
            stages of modules. The same on all ranks. None: ``step`` runs only forwards.
        scale_grads: Divide the gradients by the number of microbatches, which is correct for a
            loss that is a mean.

    Raises:
        TypeError: For arguments of another type.
        ValueError: On all ranks, if a rank's stages are not those in its row of the table, or the
            ranks' arguments differ.
    """

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        table: ScheduleTable,
        loss_fn: Any = None,
        *,
        scale_grads: bool = True,
    ) -> None:
        listed = as_stages(stages)
        self.group: ProcessGroup = listed[0].group
        with raise_on_all_ranks(self.group):
            check_instance(table, ScheduleTable, "table", "gpipe(4, 8)")
            if loss_fn is not None:
                listed[0].check_loss(loss_fn)
            _check_stages(listed, table)
        self.table: ScheduleTable = table
        self.scale_grads: bool = bool(scale_grads)
        self._loss = loss_fn
        self._stages = {stage.stage_index: stage for stage in listed}
        self._shapes = StageShapes()
        self._failed = False
        self._spans: list[ActionSpan] = []
        options = describe_options(
            schedule=table.name,
            n_microbatches=table.microbatches,
            stages=table.stages,
            table=table.digest,
            loss_fn="none" if loss_fn is None else "given",
            scale_grads=self.scale_grads,
        )
        check_same(options, self.group, "the pipeline")
        rank = self.group.rank()
        self._plans = {training: RankPlan(table, rank, training) for training in (True, False)}
        self._shared = SharedParameters(
            [
                (name, stage.stage_index, parameter)
                for stage in listed
                for name, parameter in stage.shared_parameters.items()
            ],
            self.group,
        )

    @property
    def stages(self) -> list[Stage]:
        """This rank's stages."""
        return list(self._stages.values())

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches in a batch."""
        return self.table.microbatches

    @property
    def pipeline_order(self) -> dict[int, list[Action]]:
        """The actions of each rank, in order."""
        return {rank: list(actions) for rank, actions in enumerate(self.table.ranks)}

    # ------------------------------------------------------------------ steps

    def step(
        self,
        *args: Array,
        target: Any = None,
        losses: list[float] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one batch through the pipeline, forward and (with a loss) backward.

        It adds to existing gradients, like ``backward``. Over other mesh dims (DDP,
        ``fully_shard``) gradients are averaged once. Every rank of the pipeline must call. Ranks
        without the first or last stage need no arguments, and ignore them.

        Args:
            args: The batch: the arguments of the first stage, arrays whose first dim is cut into
                microbatches. Shapes must be the same in each step.
            target: The second argument of ``loss_fn``, after the output: an array, or nested lists
                or dicts of arrays, cut the same way.
            losses: A list that is filled with the microbatches' losses on the last stage's rank.
            return_outputs: Return the last stage's outputs.
            kwargs: Further arguments of this rank's stages; arrays are cut, other values are not.

        Returns:
            The whole batch's output on the last stage's rank, None on other ranks.

        Raises:
            TypeError: For a value that is not an array.
            ValueError: If the number of rows is not divisible by the number of microbatches,
                shapes differ from the previous step, or the batch or target is missing.
            RuntimeError: After a failed step, when the ranks are no longer in step.
        """
        training = self._loss is not None
        return self._run(args, kwargs, target, losses, return_outputs, training)

    def eval(
        self, *args: Array, target: Any = None, losses: list[float] | None = None, **kwargs: Any
    ) -> Any:
        """Run one batch forward, in evaluation mode; arguments and errors are those of ``step``.

        Returns:
            The whole batch's output on the last stage's rank, None on other ranks.
        """
        return self._run(args, kwargs, target, losses, True, False)

    def _run(
        self,
        args: Sequence[Array],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[float] | None,
        return_outputs: bool,
        training: bool,
    ) -> Any:
        if self._failed:
            raise RuntimeError(
                "an earlier step of this pipeline failed on this rank, so the ranks are no longer "
                "in step; make new groups and a new schedule, and resume from a checkpoint"
            )
        batch = self._batch(args, kwargs, target, training)
        last = self._stages.get(self.table.stages - 1)
        if return_outputs and last is not None:
            batch.outputs = {}
        scale = 1 / self.n_microbatches if self.scale_grads else 1.0
        plan = self._plans[training]
        step = PipelineStep(plan, self._stages, self._shapes, batch, self._loss, scale)
        self._failed = True  # until the step is complete
        try:
            for stage in self._stages.values():
                stage.begin(training)
            if training:
                self._shared.begin()
            step.run()
            for stage in self._stages.values():
                stage.end(failed=False)
            if training:
                self._shared.finish()
            self._failed = False
        finally:
            if self._failed:
                for stage in self._stages.values():
                    stage.end(failed=True)
        self._spans = step.spans
        if losses is not None:
            losses[:] = [batch.losses[i] for i in sorted(batch.losses)]
        if batch.outputs is None or last is None:
            return None
        return _joined(last, batch.outputs)

    def _batch(
        self, args: Sequence[Array], kwargs: dict[str, Any], target: Any, training: bool
    ) -> Microbatches:
        """Check this rank's arguments, before any communication, and cut them."""
        count = self.n_microbatches
        cut_args: list[tuple[Array, ...]] = []
        if 0 in self._stages:
            if not args:
                raise ValueError("step needs the batch on the rank of the first stage, got none")
            cut_args = cut(args, count, "args")
            known = self._shapes.inputs.setdefault(0, specs_of(cut_args[0]))
            check_like(cut_args[0], known, "a microbatch")
        targets = None
        if self.table.stages - 1 in self._stages and self._loss is not None:
            if target is not None:
                targets = cut(target, count, "target")
            elif training:
                raise ValueError("step needs the target on the rank of the last stage, got None")
        return Microbatches(cut_args, cut(kwargs, count, "kwargs", keep_others=True), targets)

    # ------------------------------------------------------------------ times

    def timeline(self) -> Timing:
        """Return the times of the last step's computations on all ranks. All ranks must call.

        Times are in seconds of each host's monotonic clock, and comparable only within a host.
        """
        reports: list[list[ActionSpan]] = gathered(self._spans, self.group)
        spans = sorted(itertools.chain.from_iterable(reports), key=lambda span: span.begin)
        return Timing(self.group.size(), tuple(spans))


def _check_stages(stages: Sequence[Stage], table: ScheduleTable) -> None:
    """Raise ValueError unless ``stages`` are those in this rank's row of ``table``."""
    group = stages[0].group
    for stage in stages:
        if stage.num_stages != table.stages:
            raise ValueError(f"{stage!r}, but {table.name} has {table.stages} stages")
        if stage.group.ranks != group.ranks:
            raise ValueError(f"{stage!r} is on {stage.group}, {stages[0]!r} on {group}")
    if len(table.ranks) != group.size():
        raise ValueError(
            f"{table.name} is for {len(table.ranks)} ranks, {group} has {group.size()}"
        )
    rank = group.rank()
    own = sorted(stage.stage_index for stage in stages)
    expected = [stage for stage, at in enumerate(table.rank_of) if at == rank]
    if own != expected:
        raise ValueError(f"rank {rank} has the stages {own}; {table.name} expects {expected}")


def as_stages(stages: Any) -> list[Stage]:
    """Return ``stages`` as a list; raise TypeError unless it has at least one stage."""
    listed = [stages] if isinstance(stages, Stage) else stages
    if not isinstance(listed, Sequence) or not listed:
        raise TypeError(f"stages must be a PipelineStage, or a list of them, got {stages!r}")
    for i, stage in enumerate(cast(Sequence[Any], listed)):
        check_instance(stage, Stage, f"stages[{i}]", "PipelineStage(module, 0, 2, mesh['pp'])")
    return list(cast(Sequence[Stage], listed))


def _joined(stage: Stage, outputs: dict[int, tuple[Array, ...]]) -> Any:
    parts = [outputs[i] for i in range(len(outputs))]
    whole = tuple(stage.joined(column) for column in zip(*parts, strict=True))
    return whole[0] if len(whole) == 1 else whole
