"""``FSDPModule``, and the schedule that gathers, reduces and frees its parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from meshlib import DeviceMesh
from parallel._checks import check_instance
from parallel._core.shards import Pool
from parallel.fsdp._group import ParameterGroup
from parallel.nn._module import Module, Work, others_wait
from parallel.nn._precision import MixedPrecisionPolicy, cast, first_dtype


class Schedule:
    """The order of gathers and reductions, shared by the sharded modules below one root.

    While a module computes, the next module's parameters are gathered. Forward expects the order of
    the previous forward pass; backward, the reverse of the current one. A module may specify other
    modules to prefetch. All ranks run the same program, so their calls are in the same order.
    """

    def __init__(self, root: ModuleState, states: Sequence[ModuleState]) -> None:
        self._root = root
        self._states = list(states)
        pool = Pool()
        for state in states:
            if state.schedule is not None:
                raise RuntimeError(
                    f"{state} ran a forward pass by itself before {root}, which contains it, and is"
                    " therefore a root itself; expected the first forward of the outermost module"
                )
        for state in states:
            state.schedule = self
            for group in state.groups:
                group.pool = pool
        if root.own.reshard_after_forward is None:
            # The root's backward is the first one and would gather its parameters again at once.
            root.own.reshard_after_forward = False
        self._depth = 0
        self._begin()

    def _begin(self) -> None:
        self._outstanding = 0
        self._order: list[ModuleState] = []
        self._seen: list[ModuleState] = []
        self._passed: list[ModuleState] = []
        self._reducing: deque[ParameterGroup] = deque()
        self._averaging: list[ParameterGroup] = []

    @contextmanager
    def _running(self) -> Generator[None]:
        """Track the call's depth; an error in the outermost call resets the schedule."""
        self._depth += 1
        try:
            with ExitStack() as undo:
                if self._depth == 1:
                    undo.callback(self.abandon)
                yield
                undo.pop_all()
        finally:
            self._depth -= 1

    # ------------------------------------------------------------------ forward

    @contextmanager
    def forward(self, state: ModuleState, *, training: bool) -> Generator[None]:
        """Return a context for a module's forward: gathers parameters, prefetches the next."""
        with self._running():
            self._hold(state)
            self._seen.append(state)
            place = len(self._seen)
            following = (
                self._order[place : place + 1]
                if place <= len(self._order) and self._order[place - 1] is state
                else []
            )
            _prefetch(following if state.forward_prefetch is None else state.forward_prefetch)
            yield
            for group in state.groups:
                group.holders -= 1
                if not group.holders and (not training or group.reshard_after_forward is not False):
                    group.reshard(keep_some=training)
            if training:
                self._passed.append(state)
            if self._depth > 1:
                return
            self._order, self._seen = self._seen, []
            if training:
                self._outstanding += 1
            else:
                self._reshard_all()

    # ------------------------------------------------------------------ backward

    @contextmanager
    def backward(self, state: ModuleState) -> Generator[None]:
        """Return a context for a module's backward; prefetches for the preceding module.

        Raises RuntimeError when this backward cannot complete the gradients.
        """
        if not self._depth and state.own.sync and self._outstanding > 1:
            raise others_wait(self._outstanding - 1)
        with self._running():
            self._hold_for_gradients(state)
            while state in self._passed and self._passed.pop() is not state:
                pass
            before = self._passed[-1:]
            _prefetch(before if state.backward_prefetch is None else state.backward_prefetch)
            yield
            self._release(state)
            if self._depth == 1:
                self._end_backward()

    @contextmanager
    def deferred(self, state: ModuleState) -> Generator[None]:
        """Return a context for computing the gradients that backward deferred.

        The end of the outermost context also reduces the gradients that were complete before.
        """
        with self._running():
            self._hold_for_gradients(state)
            yield
            self._release(state)
            if self._depth == 1:
                if not self._outstanding:
                    self._reduce_complete()
                self._end_reducing()

    def _hold_for_gradients(self, state: ModuleState) -> None:
        self._hold(state)
        for group in state.groups:
            group.prepare_backward()

    def _release(self, state: ModuleState) -> None:
        for group in state.groups:
            group.holders -= 1
            if group.sync and group.is_complete:
                self._reduce(group)
            if not group.holders and group.reshard_after_backward:
                group.reshard()

    def _end_backward(self) -> None:
        self._outstanding = max(self._outstanding - 1, 0)
        if not self._outstanding:
            # Discards forward parts that the loss did not depend on.
            self._passed.clear()
            Module.discard_saved(self._root.module)
            self._reduce_complete()
        self._end_reducing()

    def _reduce_complete(self) -> None:
        for group in self._groups():
            if group.sync and group.is_complete:
                self._reduce(group)

    def _end_reducing(self) -> None:
        self._finish_reducing()
        for group in self._averaging:
            group.finish_reduce()
        self._averaging.clear()
        for group in self._groups():
            if group.reshard_after_backward and not group.holders:
                group.reshard()

    def _reduce(self, group: ParameterGroup) -> None:
        # The previous reduction had this module's whole backward to finish. Waiting for it here
        # limits the memory to two whole gradients at a time.
        self._finish_reducing()
        group.begin_reduce()
        self._reducing.append(group)

    def _finish_reducing(self) -> None:
        while self._reducing:
            group = self._reducing.popleft()
            group.scattered()
            self._averaging.append(group)

    def forget_passes(self) -> None:
        """Discard all outstanding forward passes."""
        self._outstanding = 0
        self._passed.clear()
        self._reshard_all()

    # ------------------------------------------------------------------ forward and backward

    def _hold(self, state: ModuleState) -> None:
        for group in state.groups:
            group.unshard()
            group.holders += 1

    def _groups(self) -> Iterable[ParameterGroup]:
        return (state.own for state in self._states)

    def _reshard_all(self) -> None:
        for group in self._groups():
            if not group.holders:
                group.reshard()
                group.forget_between()

    def abandon(self) -> None:
        """Reset to the state before the first forward, after an error."""
        self._begin()
        Module.discard_saved(self._root.module)
        pool = Pool()
        for group in self._groups():
            group.abandon(pool)


def _prefetch(states: Iterable[ModuleState]) -> None:
    for state in states:
        for group in state.groups:
            group.begin_unshard()


class ModuleState:
    """The parameter groups of one sharded module, its dtypes and its prefetches.

    ``own`` has the parameters that were sharded with the module, possibly none. ``borrowed`` are
    groups of other modules with which it shares parameters.
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
        """Return ``compute(*args, **kwargs)``, called with gathered parameters."""
        lower = self.policy.dtype("param_dtype")
        if lower is not None and self.policy.cast_forward_inputs:
            # Backward casts its result back to this dtype, which is the same in each pass.
            self._outside = first_dtype([args, kwargs])
            args, kwargs = cast(args, lower), cast(kwargs, lower)
        with self._find_schedule().forward(self, training=self.module.training):
            output = compute(*args, **kwargs)
        upper = self.policy.dtype("output_dtype")
        return output if upper is None else cast(output, upper)

    def backward(
        self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return ``compute(*args, **kwargs)``, called with gathered parameters."""
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


class FSDPModule(Module):
    """A module after ``fully_shard``; it remains an instance of its own class as well."""

    _fsdp: ModuleState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters and return the module's output."""
        return self._fsdp.forward(super().forward, args, kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's backward, then reduce the gradients of its parameters.

        Raises RuntimeError without a matching forward, and on the outermost module when other
        forward passes are outstanding (their gradients would be too late).
        """
        return self._fsdp.backward(super().backward, args, kwargs)

    # ------------------------------------------------------------------ parameters

    def unshard(self, async_op: bool = False) -> None:
        """Gather this module's own parameters now; with ``async_op``, only start gathering.

        All ranks must call. The parameters stay gathered until the module's next forward or
        backward, or ``reshard``, frees them.
        """
        for group in self._fsdp.groups:
            if async_op:
                group.begin_unshard()
            else:
                group.unshard()

    def reshard(self) -> None:
        """Free this module's own gathered parameters, unless they are in use."""
        for group in self._fsdp.groups:
            if not group.holders:
                group.reshard()

    def set_reshard_after_forward(self, reshard: bool, recurse: bool = True) -> None:
        """Set whether whole parameters are freed after forward, and gathered again for backward."""
        for group in self._own_groups(recurse):
            group.reshard_after_forward = bool(reshard)
            group.forward_group = None

    def set_reshard_after_backward(self, reshard: bool, recurse: bool = True) -> None:
        """Set whether whole parameters are freed after backward.

        If False, the next microbatch need not gather them. Set it to True again for the last
        microbatch before the optimizer steps.
        """
        for group in self._own_groups(recurse):
            group.reshard_after_backward = bool(reshard)

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Set the modules whose parameters are gathered while this module's forward computes.

        The default is the module that followed in the previous forward pass. Raises TypeError for
        a module that is not fully sharded.
        """
        self._fsdp.forward_prefetch = _states(modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Set the modules whose parameters are gathered while this module's backward computes.

        The default is the module that preceded it in forward. Raises TypeError for a module that
        is not fully sharded.
        """
        self._fsdp.backward_prefetch = _states(modules)

    # ------------------------------------------------------------------ gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether ``backward`` reduces gradients, or keeps them for a later backward."""
        for group in self._own_groups(recurse):
            group.sync = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are averaged over the replicas too, or only over the shards.

        If False, each rank keeps its shards' gradients until a later backward averages them over
        the replicas. Has an effect only on a mesh of two dims.
        """
        for group in self._own_groups(recurse):
            group.all_reduce = bool(requires_all_reduce)

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Return a context in which ``backward`` accumulates gradients without reducing them."""
        before = [(group, group.sync) for group in self._own_groups()]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for group, sync in before:
                group.sync = sync

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the module tree, or fill them with zeros in place."""
        super().zero_grad(set_to_none)
        for group in self._own_groups():
            group.forget_gradients()

    # ------------------------------------------------------------------ other ranks

    def move_to(self, mesh: DeviceMesh) -> None:
        """Continue with the ranks of ``mesh`` along the dims that ``fully_shard`` was called with.

        Call it on the outermost module, on all these ranks. Gradients are dropped. A rank that was
        the only shard keeps its part of the whole parameter; the caller must fill in the values of
        shards that change their size. Raises ValueError when the dims of the old mesh had no names.
        """
        states = self.sharded_states()
        for schedule in {id(state.schedule): state.schedule for state in states}.values():
            if schedule is not None:
                schedule.abandon()
        for group in self._own_groups():
            if group.forward_group is not None:
                raise ValueError(
                    "this module was fully sharded with a number as reshard_after_forward, which"
                    " cannot move to another mesh; expected True or False"
                )
            group.move_to(mesh)
            for part in group.parts:
                part.parameter.zero_grad()

    # ------------------------------------------------------------------ the tree

    def discard_saved(self) -> None:
        """Discard all outstanding forward passes of the module tree; their backward cannot run."""
        super().discard_saved()
        if self._fsdp.schedule is not None:
            self._fsdp.schedule.forget_passes()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy ``state`` into parameters and buffers in place; raises the errors of ``Module``.

        Arrays are whole, or DArrays in any sharding; with DArrays all ranks must call.
        """
        for own in self.sharded_states():
            for group in own.groups:
                group.reshard()
                group.forget_between()
        super().load_state_dict(state)

    def sharded_states(self) -> list[ModuleState]:
        """Return the states of this module and of all its fully sharded submodules."""
        return [module._fsdp for module in self.modules() if isinstance(module, FSDPModule)]

    def _own_groups(self, recurse: bool = True) -> list[ParameterGroup]:
        """Return the own parameter groups of this module, and of submodules if ``recurse``."""
        return [state.own for state in (self.sharded_states() if recurse else [self._fsdp])]


def _states(modules: Iterable[FSDPModule]) -> list[ModuleState]:
    listed = list(modules)
    for i, module in enumerate(listed):
        check_instance(module, FSDPModule, f"modules[{i}]", "fully_shard(module, mesh)")
    return [module._fsdp for module in listed]  # pyright: ignore[reportPrivateUsage]
