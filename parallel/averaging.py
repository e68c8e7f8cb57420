"""Averaging parameters, every few steps: the other half of post-local SGD.

Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", arXiv:1808.07217.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from meshlib.process_group import ProcessGroup
from parallel.ddp.replicas import average_coalesced
from parallel.groups import Ranks, resolve
from parallel.nn.parameter import Parameter
from parallel.optim.optimizer import Optimizer, ParamGroup


class ModelAverager(ABC):
    """Counts steps, and averages parameters over a group in some of those after ``warmup_steps``.

    While gradients are still averaged over all ranks, averaging parameters changes nothing: let
    ``warmup_steps`` be ``start_localSGD_iter`` of the hook's state. ``step`` is the number of steps
    so far. Raises ValueError for a negative ``warmup_steps``.
    """

    def __init__(self, warmup_steps: int) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
        self.warmup_steps = warmup_steps
        self.step = 0

    @abstractmethod
    def due(self, step: int) -> ProcessGroup | None:
        """Return the group to average over in ``step``, counted from the end of the warm-up."""

    def average_parameters(self, params: Iterable[Parameter] | Iterable[ParamGroup]) -> None:
        """Count one step; average ``params`` (or those of parameter groups) if it is its turn.

        Called by all ranks, with the same parameters in the same order.
        """
        past = self.step - self.warmup_steps
        self.step += 1
        group = self.due(past) if past >= 0 else None
        if group is None:
            return
        parameters: list[Parameter] = []
        for entry in params:
            parameters += [entry] if isinstance(entry, Parameter) else entry["params"]
        average_coalesced([parameter.data for parameter in parameters], group)


class PeriodicModelAverager(ModelAverager):
    """Averages parameters over the ranks in every ``period``-th step after ``warmup_steps``.

    Args:
        period: in steps, at least 1.
        warmup_steps: so many steps do nothing; the next one averages.
        process_group: ``mesh["dp"]``, a process group, or None for the default group.

    Raises ValueError for numbers out of range.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: Ranks | None = None
    ) -> None:
        _check_period(period)
        super().__init__(warmup_steps)
        self.period = period
        self.process_group = resolve(process_group, "process_group")

    def due(self, step: int) -> ProcessGroup | None:
        """Return the group in every ``period``-th step."""
        return None if step % self.period else self.process_group


class HierarchicalModelAverager(ModelAverager):
    """Averages over near ranks often and over far ones seldom.

        HierarchicalModelAverager({2: mesh["dp_shard"], 8: mesh["dp_replicate", "dp_shard"]})

    In a step that is the turn of several periods, the longest one's group averages, alone: it has
    the ranks of the others. (Lin et al., section 4.3: hierarchical local SGD.)

    Args:
        period_group_dict: for each period in steps, at least 1, the ranks to average over; periods
            grow, and each group has all ranks of the one before.
        warmup_steps: so many steps do nothing; the next one averages over the last group.

    Raises ValueError for no periods, numbers out of range or order, and for a group that lacks
    ranks of the one before (naming them).
    """

    def __init__(self, period_group_dict: Mapping[int, Ranks], warmup_steps: int = 0) -> None:
        super().__init__(warmup_steps)
        if not period_group_dict:
            raise ValueError("period_group_dict is empty; expected at least one period")
        periods = list(period_group_dict)
        for period in periods:
            _check_period(period)
        if periods != sorted(periods):
            raise ValueError(f"period_group_dict must have growing periods, got {periods}")
        self.groups = {
            period: resolve(ranks, f"period_group_dict[{period}]")
            for period, ranks in period_group_dict.items()
        }
        for near, far in itertools.pairwise(self.groups.values()):
            lacking = sorted(set(near.ranks) - set(far.ranks))
            if lacking:
                raise ValueError(f"period_group_dict: {far} lacks ranks {lacking} of {near}")

    def due(self, step: int) -> ProcessGroup | None:
        """Return the group of the longest period whose turn it is."""
        turns = (group for period, group in self.groups.items() if step % period == 0)
        return next(reversed(list(turns)), None)


def _check_period(period: int) -> None:
    if period < 1:
        raise ValueError(f"period must be at least 1, got {period}")


class PostLocalSGDOptimizer:
    """``optimizer``, with ``averager`` called after each step.

    Its state dict has the averager's count, so that a resumed run averages in the same steps.
    """

    def __init__(self, optimizer: Optimizer, averager: ModelAverager) -> None:
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
