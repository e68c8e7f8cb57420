"""What ``fully_shard`` keeps of one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel.fsdp.group import ParameterGroup
from parallel.fsdp.schedule import Schedule
from parallel.nn.module import Work
from parallel.nn.precision import MixedPrecisionPolicy, cast, first_dtype

if TYPE_CHECKING:
    from parallel.fsdp.module import FSDPModule


class ModuleState:
    """The groups that one module computes with, and how it runs.

    ``own`` are the parameters that were sharded with the module, which may be none at all;
    ``borrowed`` are groups of other modules that it shares parameters with.
    """

    def __init__(
        self,
        module: FSDPModule,
        own: ParameterGroup,
        borrowed: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.module = module
        self.own = own
        self.groups: list[ParameterGroup] = [own, *borrowed]
        self.policy = policy
        self.schedule: Schedule | None = None
        self.forward_prefetch: list[ModuleState] | None = None
        self.backward_prefetch: list[ModuleState] | None = None
        self._outside: np.dtype[Any] | None = None

    def __repr__(self) -> str:
        return type(self.module).__qualname__

    def forward(
        self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``compute(*args, **kwargs)``, with the parameters whole meanwhile."""
        schedule = self._find_schedule()
        lower = self.policy.dtype("param_dtype")
        if lower is not None and self.policy.cast_forward_inputs:
            # For backward, whose result is of this dtype again; it is the same in each pass.
            self._outside = first_dtype([args, kwargs])
            args, kwargs = cast(args, lower), cast(kwargs, lower)
        with schedule.running():
            schedule.before_forward(self)
            output = compute(*args, **kwargs)
            schedule.after_forward(self, training=self.module.training)
        upper = self.policy.dtype("output_dtype")
        return output if upper is None else cast(output, upper)

    def backward(
        self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``compute(*args, **kwargs)``, with the parameters whole meanwhile."""
        schedule = self._find_schedule()
        schedule.check_backward(self)
        lower = self.policy.dtype("param_dtype")
        if lower is not None:
            args, kwargs = cast(args, lower), cast(kwargs, lower)
        with schedule.running(), self.module.deferred_by(self._do_deferred):
            schedule.before_backward(self)
            result = compute(*args, **kwargs)
            schedule.after_backward(self)
        return result if self._outside is None else cast(result, self._outside)

    def _do_deferred(self, work: Work) -> None:
        schedule = self._find_schedule()
        with schedule.running():
            schedule.before_deferred(self)
            work()
            schedule.after_deferred(self)

    def _find_schedule(self) -> Schedule:
        if self.schedule is None:
            self.schedule = Schedule(self, self.module.sharded_states())
        return self.schedule
