"""Averaging parameters, every few steps: the other half of post-local SGD.

Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", arXiv:1808.07217.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parallel.ddp.replicas import average_coalesced
from parallel.groups import Ranks, resolve
from parallel.nn.parameter import Parameter
from parallel.optim.optimizer import Optimizer, ParamGroup


class PeriodicModelAverager:
    """Averages parameters over the ranks in every ``period``-th step after ``warmup_steps``.

    While gradients are still averaged over all ranks, averaging parameters changes nothing: let
    ``warmup_steps`` be ``start_localSGD_iter`` of the hook's state.

    Args:
        period: in steps, at least 1.
        warmup_steps: so many steps do nothing; the next one averages.
        process_group: ``mesh["dp"]``, a process group, or None for the default group.

    Raises ValueError for numbers out of range.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: Ranks | None = None
    ) -> None:
        if period < 1:
            raise ValueError(f"period must be at least 1, got {period}")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
        self.period = period
        self.warmup_steps = warmup_steps
        self.process_group = resolve(process_group, "process_group")
        self.step = 0

    def average_parameters(self, params: Iterable[Parameter] | Iterable[ParamGroup]) -> None:
        """Count one step; average ``params`` (or those of parameter groups) if it is its turn.

        Called by all ranks, with the same parameters in the same order.
        """
        past = self.step - self.warmup_steps
        self.step += 1
        if past < 0 or past % self.period:
            return
        parameters: list[Parameter] = []
        for entry in params:
            parameters += [entry] if isinstance(entry, Parameter) else entry["params"]
        average_coalesced([parameter.data for parameter in parameters], self.process_group)


class PostLocalSGDOptimizer:
    """``optimizer``, with ``averager`` called after each step.

    Its state dict has the averager's count, so that a resumed run averages in the same steps.
    """

    def __init__(self, optimizer: Optimizer, averager: PeriodicModelAverager) -> None:
        self.optimizer = optimizer
        self.averager = averager

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The optimizer's."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Update the parameters here, then average them if it is their turn."""
        self.optimizer.step()
        self.averager.average_parameters(self.optimizer.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the parameters' gradients, or fill them with zeros in place."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's, and the averager's count as ``"step"``."""
        return {**self.optimizer.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self.optimizer.load_state_dict({k: v for k, v in state.items() if k != "step"})
        self.averager.step = int(state["step"])
