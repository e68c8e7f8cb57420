"""``PipelineSchedule``: runs batches through the stages as a table says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from meshlib import ProcessGroup
from parallel._arrays import Array
from parallel._checks import check_instance
from parallel._core.pipeline.executor import Microbatches, PipelineStep, cut, cut_kwargs, cut_target
from parallel._core.pipeline.messages import MessageEnd, RankPlan, StageShapes, joined, watched
from parallel._core.pipeline.simulation import ActionSpan, Timing
from parallel._core.pipeline.stage import SharedParameters, Stage, check_like, specs_of
from parallel._core.pipeline.table import Action, ScheduleTable
from parallel._core.replicas import describe_options, first_difference
from parallel._groups import gathered


class PipelineSchedule:
    """Runs batches through a pipeline, by any table.

    ``ScheduleGPipe`` and the others make their own table. All ranks make the schedule. It compares
    their arguments, and raises one rank's mistake on all of them.

    Args:
        stages: This rank's stage, or a list of its stages.
        table: The actions of each rank, in order.
        loss_fn: The loss of the last stage's output and the target: a ``parallel.nn`` module for
            stages of modules. The same on all ranks; without it ``step`` runs forwards alone.
        scale_grads: Divide the gradients by the number of microbatches: right for a loss that is a
            mean.

    Raises:
        TypeError: For arguments of another type.
        ValueError: On all ranks, when a rank's stages are not those that the table gives it, or
            the ranks' arguments differ.
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
        check_instance(table, ScheduleTable, "table", "gpipe(4, 8)")
        if loss_fn is not None:
            listed[0].check_loss(loss_fn)
        self.table: ScheduleTable = table
        self.group: ProcessGroup = listed[0].group
        self.scale_grads: bool = bool(scale_grads)
        self._loss = loss_fn
        self._stages = {stage.stage_index: stage for stage in listed}
        self._shapes = StageShapes()
        self._failed = False
        self._spans: list[ActionSpan] = []
        self._ends: list[MessageEnd] = []
        options = describe_options(
            schedule=table.name,
            n_microbatches=table.microbatches,
            stages=table.stages,
            table=table.digest,
            loss_fn="none" if loss_fn is None else "given",
            scale_grads=self.scale_grads,
        )
        agree(self.group, self._mistake(listed), options)
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

    @classmethod
    def from_csv(
        cls,
        stages: Stage | Sequence[Stage],
        source: str | Path,
        loss_fn: Any = None,
        *,
        scale_grads: bool = True,
    ) -> PipelineSchedule:
        """Return a schedule whose table is in a file: see ``ScheduleTable.from_csv``."""
        return PipelineSchedule(
            stages, ScheduleTable.from_csv(source), loss_fn, scale_grads=scale_grads
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

    # ------------------------------------------------------------------ the ranks agree

    def _mistake(self, stages: Sequence[Stage]) -> str | None:
        """Return what is wrong with this rank's arguments, None if nothing is."""
        table, size = self.table, self.group.size()
        for stage in stages:
            if stage.num_stages != table.stages:
                return f"{stage!r}, but {table.name} has {table.stages} stages"
            if stage.group.ranks != self.group.ranks:
                return f"{stage!r} is on {stage.group}, {stages[0]!r} on {self.group}"
        if len(table.ranks) != size:
            return f"{table.name} is for {len(table.ranks)} ranks, {self.group} has {size}"
        rank = self.group.rank()
        own = sorted(stage.stage_index for stage in stages)
        expected = [stage for stage, at in enumerate(table.rank_of) if at == rank]
        if own != expected:
            return f"rank {rank} has the stages {own}; {table.name} gives it {expected}"
        return None

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

        It adds to existing gradients, as ``backward`` does. Over other dims (DDP, ``fully_shard``)
        gradients are averaged once. Every rank of the pipeline must call. Ranks without the first
        or last stage need no arguments, and ignore them.

        Args:
            args: The batch: arrays whose first dim is cut into microbatches, the arguments of the
                first stage. Each step's have the same shapes.
            target: The second argument of ``loss_fn``, after the output: an array, or several in
                lists or dicts, cut the same way.
            losses: A list that is filled with the microbatches' losses, where the last stage is.
            return_outputs: Return the last stage's outputs.
            kwargs: Further arguments of this rank's stages; arrays are cut, other values are not.

        Returns:
            The whole batch's output where the last stage is, None elsewhere.

        Raises:
            TypeError: For what is no array.
            ValueError: For rows that do not divide into the microbatches, another shape than in
                the step before, and a batch or target that is missing.
            RuntimeError: After a step that failed: the ranks are no longer in step.
        """
        training = self._loss is not None
        return self._run(args, kwargs, target, losses, return_outputs, training)

    def eval(
        self, *args: Array, target: Any = None, losses: list[float] | None = None, **kwargs: Any
    ) -> Any:
        """Run one batch forward, in evaluation mode; arguments and errors are those of ``step``.

        Returns:
            The whole batch's output where the last stage is, None elsewhere.
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
        self._failed = True  # until all is done
        try:
            with watched(self.group) as ends:
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
        self._spans, self._ends = step.spans, ends
        if losses is not None:
            losses[:] = [batch.losses[i] for i in sorted(batch.losses)]
        if batch.outputs is None or last is None:
            return None
        return _joined(last, batch.outputs)

    def _batch(
        self, args: Sequence[Array], kwargs: dict[str, Any], target: Any, training: bool
    ) -> Microbatches:
        """Check what this rank was given, and cut it; no byte has moved by then."""
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
                targets = cut_target(target, count)
            elif training:
                raise ValueError("step needs the target on the rank of the last stage, got None")
        return Microbatches(cut_args, cut_kwargs(kwargs, count), targets)

    # ------------------------------------------------------------------ times

    def timeline(self) -> Timing:
        """Return the times of the last step's computations and messages on all ranks. All ranks
        call.

        Times are in seconds, of the hosts' monotonic clocks: ranks of one host can be compared.
        """
        reports: list[tuple[list[ActionSpan], list[MessageEnd]]]
        reports = gathered((self._spans, self._ends), self.group)
        spans = sorted((span for own, _ in reports for span in own), key=lambda span: span.begin)
        transfers = joined([ends for _, ends in reports])
        return Timing(self.group.size(), tuple(spans), tuple(transfers))


def agree(group: ProcessGroup, mistake: str | None, lines: Sequence[str]) -> None:
    """Raise ValueError on all ranks if one has made a mistake, or its ``lines`` differ.

    A collective. ``mistake`` is what is wrong on this rank, None if nothing is.
    """
    reports: list[tuple[str | None, list[str]]] = gathered((mistake, list(lines)), group)
    wrong = [(rank, text) for rank, (text, _) in enumerate(reports) if text]
    if not wrong:
        compared = ((r, first_difference(own, reports[0][1])) for r, (_, own) in enumerate(reports))
        wrong = [(rank, text) for rank, text in compared if text]
    if wrong:
        rows = "".join(f"\n  rank {rank}: {text}" for rank, text in wrong)
        raise ValueError(f"the pipeline on {group} does not fit:{rows}")


def as_stages(stages: Any) -> list[Stage]:
    """Return ``stages`` as a list of at least one; raise TypeError for anything else."""
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
