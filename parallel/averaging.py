"""Periodic averaging of parameters, for post-local SGD.

Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", arXiv:1808.07217.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from meshlib import ProcessGroup
from parallel._checks import check_instance, check_state_dict, to_count
from parallel._core.replicas import average_coalesced
from parallel._groups import GroupLike, resolve
from parallel.join._context import FunctionsHook, Join, Joinable, JoinHook, OptimizerReplica
from parallel.nn._parameter import Parameter
from parallel.optim._optimizer import Optimizer, ParamGroup


class ModelAverager(ABC):
    """Counts steps, and averages parameters over a group in some steps after ``warmup_steps``.

    Averaging parameters changes nothing while the hook averages gradients over all ranks. So pass
    ``start_localSGD_iter`` of the hook's state as ``warmup_steps``. ``step`` is the number of steps
    so far. ``groups`` are the possible groups for averaging; the last one contains all ranks of
    the others.

    For uneven inputs, pass the ``PostLocalSGDOptimizer`` that holds the averager to ``model.join``.

    Raises ValueError for a negative ``warmup_steps``, TypeError for a value that is not an integer.
    """

    def __init__(self, warmup_steps: int, groups: Iterable[ProcessGroup]) -> None:
        self.warmup_steps: int = to_count(warmup_steps, "warmup_steps", 0)
        self.groups: list[ProcessGroup] = list(groups)
        self.step: int = 0

    @abstractmethod
    def due(self, step: int) -> ProcessGroup | None:
        """Return the group to average over in ``step``, counted from the end of the warm-up."""

    def average_parameters(self, params: Iterable[Parameter] | Iterable[ParamGroup]) -> None:
        """Count one step, and average ``params`` if the step is due for averaging.

        ``params`` are parameters or parameter groups. All ranks must call with the same parameters
        in the same order.
        """
        group = self.count_step()
        if group is not None:
            average_over(group, params)

    def count_step(self) -> ProcessGroup | None:
        """Count one step; return the group over which to average in it, if any."""
        past = self.step - self.warmup_steps
        self.step += 1
        return self.due(past) if past >= 0 else None


def average_over(
    group: ProcessGroup,
    params: Iterable[Parameter] | Iterable[ParamGroup],
    counting: Collection[int] | None = None,
) -> None:
    """Replace ``params`` by their average over the group ranks ``counting`` (None: all)."""
    parameters: list[Parameter] = []
    for entry in params:
        parameters += [entry] if isinstance(entry, Parameter) else entry["params"]
    average_coalesced([parameter.data for parameter in parameters], group, counting)


class PeriodicModelAverager(ModelAverager):
    """Averages parameters over a group in every ``period``-th step after ``warmup_steps``.

    Args:
        period: In steps, at least 1.
        warmup_steps: The number of initial steps without averaging; the next step averages.
        process_group: ``mesh["dp"]``, a process group, or None for the default group.

    Raises ValueError for numbers out of range, TypeError for arguments of another type.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: GroupLike | None = None
    ) -> None:
        self.period: int = to_count(period, "period")
        self.process_group: ProcessGroup = resolve(process_group, "process_group")
        super().__init__(warmup_steps, [self.process_group])

    def due(self, step: int) -> ProcessGroup | None:
        """Return the group in every ``period``-th step."""
        return None if step % self.period else self.process_group


class HierarchicalModelAverager(ModelAverager):
    """Averages often over nearby ranks and less often over distant ranks.

        HierarchicalModelAverager({2: mesh["dp_shard"], 8: mesh["dp_replicate", "dp_shard"]})

    If several periods end in one step, only the group of the longest one averages: it contains
    the other groups. (Lin et al., section 4.3: hierarchical local SGD.)

    Args:
        period_group_dict: The ranks to average over for each period (in steps, at least 1), in
            order of increasing period. Each group contains all ranks of the previous one.
        warmup_steps: The number of initial steps without averaging; the next step averages over
            the last group.

    Raises ValueError if there are no periods, for numbers out of range or order, and for a group
    that lacks ranks of the previous group (naming them); TypeError for arguments of another type.
    """

    def __init__(self, period_group_dict: Mapping[int, GroupLike], warmup_steps: int = 0) -> None:
        check_instance(period_group_dict, Mapping, "period_group_dict", "{2: mesh['dp']}")
        if not period_group_dict:
            raise ValueError("period_group_dict is empty; expected at least one period")
        periods = [to_count(period, "period") for period in period_group_dict]
        if periods != sorted(periods):
            raise ValueError(f"period_group_dict must have increasing periods, got {periods}")
        self.periods = periods
        super().__init__(
            warmup_steps,
            [resolve(ranks, f"period_group_dict[{p}]") for p, ranks in period_group_dict.items()],
        )
        for near, far in itertools.pairwise(self.groups):
            lacking = sorted(set(near.ranks) - set(far.ranks))
            if lacking:
                raise ValueError(f"period_group_dict: {far} lacks ranks {lacking} of {near}")

    def due(self, step: int) -> ProcessGroup | None:
        """Return the group of the longest period that divides ``step``."""
        pairs = reversed([*zip(self.periods, self.groups, strict=True)])
        return next((group for period, group in pairs if step % period == 0), None)


class PostLocalSGDOptimizer(Joinable):
    """A wrapper of ``optimizer`` that calls ``averager`` after each step.

    The state dict contains the averager's step count, so a resumed run averages in the same steps.

    In a ``Join`` with the model, the averager's last group must be the model's. The parameters of a
    rank that is out of inputs do not count in later averages. At the end this rank copies the state
    of a rank that continued.

    Raises TypeError if ``averager`` is not a ``ModelAverager``.
    """

    def __init__(self, optimizer: Optimizer, averager: ModelAverager) -> None:
        check_instance(averager, ModelAverager, "averager")
        self.optimizer = optimizer
        self.averager = averager

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    def step(self) -> None:
        """Update this rank's parameters, then average them if the step is due for averaging."""
        self.optimizer.step()
        group = self.averager.count_step()
        if group is not None:
            with Join.notify_join_context(self, self.averager.groups.index(group)) as join:
                self._average(group, join)

    def _average(self, group: ProcessGroup, join: Join | None) -> None:
        counting = None if join is None else join.active_in(group)
        average_over(group, self.optimizer.param_groups, counting)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' gradients, or fill them with zeros in place."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict, with the averager's count as ``"step"``."""
        return {**self.optimizer.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned. Raises the optimizer's errors."""
        check_state_dict(state, "step")
        self.optimizer.load_state_dict({k: v for k, v in state.items() if k != "step"})
        self.averager.step = int(state["step"])

    @property
    def join_process_group(self) -> ProcessGroup:
        """The averager's last group: all replicas."""
        return self.averager.groups[-1]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that joins in the other ranks' averages, and finally copies the state."""
        copy = OptimizerReplica(self, self.join_process_group).join_hook()
        return FunctionsHook(self._shadow, copy.post_hook)

    def _shadow(self, phase: int) -> None:
        self._average(self.averager.groups[phase], self.join_context)

    def phase_name(self, phase: int) -> str:
        """Return the name of a phase in messages."""
        return f"averaging over {self.averager.groups[phase]}"
