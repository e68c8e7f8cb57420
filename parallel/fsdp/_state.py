"""What ``fully_shard`` keeps of one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel.fsdp._group import ParameterGroup
from parallel.fsdp._schedule import Schedule
from parallel.nn._module import Work
from parallel.nn._precision import MixedPrecisionPolicy, cast, first_dtype

if TYPE_CHECKING:
    from parallel.fsdp._module import FSDPModule


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
        lower = self.policy.dtype("param_dtype")
        if lower is not None and self.policy.cast_forward_inputs:
            # For backward, whose result is of this dtype again; it is the same in each pass.
            self._outside = first_dtype([args, kwargs])
            args, kwargs = cast(args, lower), cast(kwargs, lower)
        with self._find_schedule().forward(self, training=self.module.training):
            output = compute(*args, **kwargs)
        upper = self.policy.dtype("output_dtype")
        return output if upper is None else cast(output, upper)

    def backward(
        self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``compute(*args, **kwargs)``, with the parameters whole meanwhile."""
        lower = self.policy.dtype("param_dtype")
        if lower is not None:
            args, kwargs = cast(args, lower), cast(kwargs, lower)
        with self._find_schedule().backward(self), self.module.deferred_by(self._do_deferred):
            result = compute(*args, **kwargs)
        return result if self._outside is None else cast(result, self._outside)

    def _do_deferred(self, work: Work) -> None:
        with self._find_schedule().deferred(self):
            work()

    def _find_schedule(self) -> Schedule:
        if self.schedule is None:
            self.schedule = Schedule(self, self.module.sharded_states())
        return self.schedule
