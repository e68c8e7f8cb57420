"""``FSDPModule``: what a module that was fully sharded can do besides."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from meshlib import DeviceMesh
from parallel._checks import check_instance
from parallel.fsdp._group import ParameterGroup
from parallel.fsdp._schedule import ModuleState
from parallel.nn._module import Module


class FSDPModule(Module):
    """What ``fully_shard`` makes of a module: of a class of its own and of the module's."""

    _fsdp: ModuleState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output; its parameters are gathered for it."""
        return self._fsdp.forward(super().forward, args, kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's backward; the gradients of its parameters are reduced after it.

        Raises RuntimeError without a matching forward, and on the outermost module when other
        forward passes are outstanding (their gradients would come too late).
        """
        return self._fsdp.backward(super().backward, args, kwargs)

    # ------------------------------------------------------------------ parameters

    def unshard(self, async_op: bool = False) -> None:
        """Gather this module's own parameters now; with ``async_op`` only begin with it.

        All ranks call. Its next forward or backward finds them; they stay until that, or
        ``reshard``, gives them up.
        """
        for group in self._fsdp.groups:
            if async_op:
                group.begin_unshard()
            else:
                group.unshard()

    def reshard(self) -> None:
        """Give up this module's own whole parameters, if they are gathered and not in use."""
        for group in self._fsdp.groups:
            if not group.holders:
                group.reshard()

    def set_reshard_after_forward(self, reshard: bool, recurse: bool = True) -> None:
        """Say whether whole parameters are given up after forward, and gathered for backward."""
        for group in self._own_groups(recurse):
            group.reshard_after_forward = bool(reshard)
            group.forward_group = None

    def set_reshard_after_backward(self, reshard: bool, recurse: bool = True) -> None:
        """Say whether whole parameters are given up after backward.

        Without, the next microbatch need not gather them. It must be on again for the last one
        before the optimizer steps.
        """
        for group in self._own_groups(recurse):
            group.reshard_after_backward = bool(reshard)

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Say whose parameters are gathered while this module's forward computes.

        Without, those of the module that came next in the forward pass before. An empty list: none.
        Raises TypeError for what was not fully sharded.
        """
        self._fsdp.forward_prefetch = _states(modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Say whose parameters are gathered while this module's backward computes.

        Without, those of the module that came before it in forward. An empty list: none. Raises
        TypeError for what was not fully sharded.
        """
        self._fsdp.backward_prefetch = _states(modules)

    # ------------------------------------------------------------------ gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether ``backward`` reduces gradients, or keeps them, whole, for a later one."""
        for group in self._own_groups(recurse):
            group.sync = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether gradients are averaged over the replicas, too, or only over the shards.

        Without, each rank keeps its parts' gradients, for a later backward that does. It means
        something on a mesh of two dims only.
        """
        for group in self._own_groups(recurse):
            group.all_reduce = bool(requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Within this context ``backward`` accumulates whole gradients and reduces nothing."""
        before = [(group, group.sync) for group in self._own_groups()]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, sync in before:
                group.sync = sync

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the tree, or fill them with zeros in place."""
        super().zero_grad(set_to_none)
        for group in self._own_groups():
            group.forget_gradients()

    # ------------------------------------------------------------------ other ranks

    def move_to(self, mesh: DeviceMesh) -> None:
        """Go on with the ranks of ``mesh``, along the dims that ``fully_shard`` was given.

        For the outermost module; all those ranks call. Gradients are dropped. A rank that was the
        only shard keeps its part of the whole; the values of parts that have another size are the
        caller's affair. Raises ValueError when that mesh had no names for its dims.
        """
        states = self.sharded_states()
        for schedule in {id(state.schedule): state.schedule for state in states}.values():
            if schedule is not None:
                schedule.abandon()
        for group in self._own_groups():
            if group.forward_group is not None:
                raise ValueError(
                    "this module was fully sharded with a number as reshard_after_forward, for"
                    " which there is no group of other ranks; expected True or False"
                )
            group.move_to(mesh)
            for part in group.parts:
                part.parameter.zero_grad()

    # ------------------------------------------------------------------ the tree

    def discard_saved(self) -> None:
        """Forget all outstanding forward passes of the tree: their backward will not run."""
        super().discard_saved()
        if self._fsdp.schedule is not None:
            self._fsdp.schedule.forget_passes()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy ``state`` into parameters and buffers, in place; raises as ``Module``'s does.

        Its arrays are DArrays in any sharding, when all ranks call, or whole ones.
        """
        for own in self.sharded_states():
            for group in own.groups:
                group.reshard()
                group.forget_between()
        super().load_state_dict(state)

    def sharded_states(self) -> list[ModuleState]:
        """Return the states of this module and of all fully sharded ones below it, each once."""
        return [module._fsdp for module in self.modules() if isinstance(module, FSDPModule)]

    def _own_groups(self, recurse: bool = True) -> list[ParameterGroup]:
        """Return the groups of parameters that those modules, or this one alone, were given."""
        return [state.own for state in (self.sharded_states() if recurse else [self._fsdp])]


def _states(modules: Iterable[FSDPModule]) -> list[ModuleState]:
    listed = list(modules)
    for i, module in enumerate(listed):
        check_instance(module, FSDPModule, f"modules[{i}]", "fully_shard(module, mesh)")
    return [module._fsdp for module in listed]  # pyright: ignore[reportPrivateUsage]
