"""The executor: cuts a batch into microbatches, and runs this rank's actions of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from parallel._arrays import Array
from parallel._core.pipeline.messages import AHEAD, RankPlan, StageMessages, StageShapes
from parallel._core.pipeline.simulation import ActionSpan
from parallel._core.pipeline.stage import Stage, check_like, specs_of
from parallel._core.pipeline.table import Action, ActionKind
from parallel._nested import map_leaves


def rows_of(array: Any, i: int, count: int, name: str) -> Array:
    """Return the rows of microbatch ``i`` of ``count``.

    Raises TypeError for a value that is not an array with dims, ValueError if its first dim is not
    divisible by ``count``.
    """
    shape = getattr(array, "shape", None)
    if not shape:
        raise TypeError(
            f"{name} must be an array whose first dim is divided into {count} microbatches, got "
            f"{type(array).__name__}"
        )
    if shape[0] % count or not shape[0]:
        raise ValueError(
            f"{name} has {shape[0]} rows, which is not divisible by {count} microbatches"
        )
    rows = shape[0] // count
    return array[i * rows : (i + 1) * rows]


def cut(value: Any, count: int, name: str, *, keep_others: bool = False) -> list[Any]:
    """Return ``value`` for each of ``count`` microbatches, with arrays cut along dim 0.

    With ``keep_others``, leaves that are not arrays with dims are not cut. Raises the errors of
    ``rows_of``.
    """

    def part(i: int, path: str, leaf: Any) -> Any:
        if keep_others and not getattr(leaf, "shape", None):
            return leaf
        return rows_of(leaf, i, count, f"{name}{path}")

    return [map_leaves(partial(part, i), value) for i in range(count)]


@dataclass
class Microbatches:
    """A rank's inputs to a step, cut into microbatches, and its results.

    ``args`` are used on the rank of the first stage, ``targets`` on the rank of the last.
    """

    args: Sequence[tuple[Array, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    losses: dict[int, float] = field(default_factory=dict[int, float])
    outputs: dict[int, tuple[Array, ...]] | None = None


class PipelineStep:
    """One step of one rank: the actions of its plan in order. ``run`` must be called only once.

    ``loss`` is called with the outputs of the last stage, if this rank has it; the gradient is
    multiplied by ``scale``.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Stage],
        shapes: StageShapes,
        batch: Microbatches,
        loss: Any,
        scale: float,
    ) -> None:
        self._plan, self._stages = plan, stages
        self._shapes, self._batch = shapes, batch
        self._loss, self._scale, self._training = loss, scale, plan.training
        group = next(iter(stages.values())).group
        self._messages = StageMessages(plan, group, shapes, stages)
        self._loss_grads: dict[int, tuple[Array, ...]] = {}
        self.spans: list[ActionSpan] = []

    def run(self) -> None:
        """Run all actions. Raises the errors of stages and of messages."""
        row = self._plan.row
        for place, action in enumerate(row):
            inputs = self._inputs(action)
            for later in row[place + 1 : place + AHEAD + 1]:
                self._messages.expect(later)
            begin = monotonic()
            result = self._do(action, inputs)
            self.spans.append(ActionSpan(self._plan.rank, action, begin, monotonic()))
            if result is not None:
                self._messages.send(action, result)
        self._messages.finish()

    def _inputs(self, action: Action) -> tuple[Array | None, ...]:
        """Wait for the inputs of the action and return them."""
        stage, kind, microbatch = action
        if kind is ActionKind.WEIGHT:
            return ()
        if kind is ActionKind.FORWARD and self._stages[stage].is_first:
            return self._batch.args[microbatch]
        if kind is not ActionKind.FORWARD and self._stages[stage].is_last:
            return self._loss_grads.pop(microbatch)
        return self._messages.receive(action)

    def _do(
        self, action: Action, inputs: tuple[Array | None, ...]
    ) -> tuple[Array | None, ...] | None:
        stage, last = self._stages[action.stage], action is self._plan.last.get(action.stage)
        if action.kind is ActionKind.FORWARD:
            return self._forward(stage, action.microbatch, inputs)
        if action.kind is ActionKind.WEIGHT:
            return stage.backward_weight(action.microbatch, last=last)
        if action.kind is ActionKind.INPUT:
            grads = stage.backward_input(action.microbatch, inputs)
        else:
            grads = stage.backward(action.microbatch, inputs, last=last)
        return None if stage.is_first else self._checked(stage, grads)

    def _forward(self, stage: Stage, microbatch: int, inputs: Sequence[Any]) -> tuple[Array, ...]:
        outputs = stage.forward(microbatch, inputs, self._batch.kwargs[microbatch])
        known = self._shapes.outputs.setdefault(stage.stage_index, specs_of(outputs))
        check_like(outputs, known, f"the output of {stage!r} for microbatch {microbatch}")
        if stage.is_last:
            self._end_forward(stage, microbatch, outputs)
        return outputs

    def _end_forward(self, stage: Stage, microbatch: int, outputs: tuple[Array, ...]) -> None:
        if self._batch.outputs is not None:
            self._batch.outputs[microbatch] = outputs
        if self._loss is None or self._batch.targets is None:
            return
        loss, grads = stage.loss(
            self._loss,
            outputs,
            self._batch.targets[microbatch],
            self._scale if self._training else None,
        )
        self._batch.losses[microbatch] = loss
        if self._training:
            self._loss_grads[microbatch] = grads

    def _checked(self, stage: Stage, grads: Sequence[Array | None]) -> tuple[Array | None, ...]:
        """Check the gradients of the inputs; return None for integers, zeros for missing ones."""
        specs = self._shapes.inputs[stage.stage_index]
        if len(grads) != len(specs):
            raise ValueError(
                f"backward of {stage!r} returned {len(grads)} gradients for {len(specs)} inputs"
            )
        checked: list[Array | None] = []
        for number, (grad, spec) in enumerate(zip(grads, specs, strict=True)):
            if not spec.is_trained:
                checked.append(None)
            elif grad is None:
                zeros = stage.empty(spec)
                zeros[...] = 0
                checked.append(zeros)
            else:
                check_like([grad], (spec,), f"the gradient of input {number} of {stage!r}")
                checked.append(grad)
        return tuple(checked)
