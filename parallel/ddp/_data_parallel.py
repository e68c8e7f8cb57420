"""``DistributedDataParallel``: the same model on every rank, trained on different data."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from meshlib import DeviceMesh, ProcessGroup
from meshlib.extend import log_of
from parallel._checks import describe
from parallel._core.assignment import FIRST_BUCKET_BYTES, MIB, cap_in_bytes
from parallel._core.buckets import ReducerOptions
from parallel._core.comm_hooks import CommHook, allreduce_hook, compress_wrapper
from parallel._core.passes import PassStatistics
from parallel._core.reducer import WHAT_TO_DO
from parallel._core.replicas import broadcast_coalesced, raise_on_all_ranks
from parallel._groups import GroupLike, resolve, same_dims
from parallel.ddp._gradients import ParameterGradients, check_same_model
from parallel.join._context import FunctionsHook, Join, Joinable, JoinHook, OptimizerReplica
from parallel.nn._module import Module, others_wait
from parallel.nn._precision import Casting, MixedPrecision

_T = TypeVar("_T")


class _StepPhase(enum.IntEnum):
    """The parts of a step in which a wrapper communicates."""

    FORWARD = 1
    BACKWARD = 2


class DistributedDataParallel(Module, Joinable):
    """Data parallel training of ``module``: averages gradients over ranks after each backward.

    For pytrees of JAX arrays, use ``parallel.jax.DistributedDataParallel``; its methods differ.

    Construction compares the parameters' names, shapes and dtypes over the ranks, and copies group
    rank 0's parameters and buffers to all ranks. Each ``backward`` averages the gradients in
    buckets. A bucket is reduced as soon as it is complete, while the rest of the backward pass
    computes. After ``backward`` returns, ``grad`` of each parameter holds the average. Buckets are
    in the group's symmetric memory if it has any, which saves staging copies.

    A rank may have one forward pass outstanding when it synchronises. With several microbatches,
    run all backward passes but the last inside ``no_sync``: their gradients accumulate locally,
    and the last one reduces the sum.

    Parameters may be frozen and unfrozen later (``requires_grad``), on all ranks between the same
    two steps. After a failed synchronised backward, the ranks are out of step: every later backward
    raises an error that says what to do.

    Args:
        module: The model; its set of parameters must not change afterwards.
        process_group: The replicas: ``mesh["dp"]``, any other mesh or group, or None for the
            default group. Over several mesh dimensions (``mesh["dp", "cp"]``) gradients are
            averaged over all of them.
        bucket_cap_mb: The bucket size in MiB. The first bucket's size is 1 MiB, or this if less.
        broadcast_buffers: Copy rank 0's buffers to all ranks before each training forward whose
            backward synchronises.
        init_sync: Compare the ranks' models and copy rank 0's values at construction. If False,
            the caller guarantees equal replicas.
        find_unused_parameters: Allow steps in which a rank uses only some of the parameters. An
            unused parameter counts as a gradient of zero; one that no rank used keeps its gradient.
            Costs a small all-reduce per step. If False, an unused parameter raises an error that
            names it.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves the memory and
            the time of one copy of all gradients.
        static_graph: Every step uses the same parameters. Parameters that the first step does not
            use are allowed, and the small all-reduce is made only once.
        mixed_precision: Dtypes to compute or average in, instead of the parameters' dtype.

    Raises:
        ValueError: When the ranks' models or options differ (naming the first difference), or for
            a bucket size that is not positive.
        TypeError: For arguments of another type.
        RuntimeError: For a model without trainable parameters.
    """

    def __init__(
        self,
        module: Module,
        process_group: GroupLike | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        mixed_precision: MixedPrecision | None = None,
    ) -> None:
        super().__init__()
        self.process_group: ProcessGroup = resolve(process_group, "process_group")
        with raise_on_all_ranks(self.process_group if init_sync else None):
            if not isinstance(module, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"module must be a parallel.nn.Module, got {describe(module)}; for a pytree of"
                    " JAX arrays, use parallel.jax.DistributedDataParallel"
                )
            cap = cap_in_bytes(bucket_cap_mb)
            if not isinstance(mixed_precision, MixedPrecision | None):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    "mixed_precision must be a MixedPrecision, such as MixedPrecision('float16'),"
                    f" got {mixed_precision!r}"
                )
            precision = mixed_precision or MixedPrecision()
            named = list(module.named_parameters())
            if not any(parameter.requires_grad for _, parameter in named):
                raise RuntimeError("the module has no parameter that requires a gradient")
        self._precision = precision
        self.module = module
        self.training: bool = module.training
        self._ranks = process_group
        self.broadcast_buffers = broadcast_buffers
        self._sync = True
        self._custom_hook = False
        if init_sync:
            check_same_model(
                module,
                self.process_group,
                bucket_cap_mb=float(bucket_cap_mb),
                broadcast_buffers=broadcast_buffers,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                mixed_precision=self._precision,
            )
            self._copy_from(0)
        options = ReducerOptions(
            first_bytes=min(FIRST_BUCKET_BYTES, cap),
            cap_bytes=cap,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )
        self._gradients = ParameterGradients(
            named, self.process_group, options, as_views=gradient_as_bucket_view
        )
        dtype = self._precision.param_dtype
        self._casting = None if dtype is None else Casting(module, dtype)
        self._set_hook(None, allreduce_hook)
        self._average_over_all = True
        self.statistics: PassStatistics | None = None
        """The times of the last synchronised step; None before the first."""
        log_of(self.process_group).info(
            "DistributedDataParallel on %s: %d parameters, %.1f MiB of gradients in %d buckets; "
            "bucket_cap_mb=%g broadcast_buffers=%s gradient_as_bucket_view=%s %s %s",
            self.process_group,
            len(named),
            sum(p.data.nbytes for _, p in named if p.requires_grad) / MIB,
            len(self.buckets),
            bucket_cap_mb,
            broadcast_buffers,
            gradient_as_bucket_view,
            options,
            self._precision,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``module``'s output for this rank's data."""
        due = self.training and self._sync and self.broadcast_buffers and not self.outstanding
        if due and any(True for _ in self.module.buffers()):
            with Join.notify_join_context(self, _StepPhase.FORWARD) as join:
                self._broadcast_buffers(0 if join is None else join.first_active)
        begin = time.perf_counter()
        if self._casting is None:
            output, context = self.module(*args, **kwargs), None
        else:
            output, context = self._casting.forward(*args, **kwargs)
        if self.training:
            self._gradients.reducer.stopwatch.add_forward(begin)
        self.save_for_backward(context)
        return output

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``module.backward`` and average the gradients, unless inside ``no_sync``.

        Raises RuntimeError without a matching forward, when other forward passes are outstanding
        (their gradients would be too late), and for unused parameters.
        """
        if self._sync and self.outstanding > 1:
            raise others_wait(self.outstanding - 1)
        context = self.saved()

        def compute() -> Any:
            if self._casting is None:
                return self.module.backward(*args, **kwargs)
            return self._casting.backward(context, *args, **kwargs)

        return self._synchronised(compute) if self._sync else self._timed(compute)

    def average_after(self, compute: Callable[[], object]) -> None:
        """Call ``compute``, which completes gradients accumulated in ``no_sync``; average them.

        For a backward in two halves (``Module.deferring``), ``compute`` is the last second half.
        Gradients that are already complete are averaged as well.

        Raises RuntimeError for parameters without a gradient, unless unused ones were allowed.
        """
        self._synchronised(compute, accumulated=True)

    def _timed(self, compute: Callable[[], _T]) -> _T:
        begin = time.perf_counter()
        result = compute()
        self._gradients.reducer.stopwatch.add_backward(begin)
        return result

    def _synchronised(self, compute: Callable[[], _T], *, accumulated: bool = False) -> _T:
        try:
            with Join.notify_join_context(self, _StepPhase.BACKWARD):
                try:
                    self._gradients.begin(accumulated=accumulated)
                    result = self._timed(compute)
                    self._gradients.reducer.finish(self._scale)
                except BaseException as error:
                    if self._gradients.reducer.failure is None:
                        error.add_note(
                            "A backward pass of DistributedDataParallel ended here before its "
                            "gradients were reduced; other ranks may be waiting for this one. "
                            f"{WHAT_TO_DO}"
                        )
                        self._gradients.fail(error)
                    raise
        finally:
            # Also discards forward parts that the loss did not depend on and, after an error,
            # the whole pass, which allows wrapping the module again.
            self.module.discard_saved()
        self.statistics = self._gradients.reducer.stopwatch.finish()
        return result

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Return a context in which ``backward`` accumulates gradients without reducing them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Reduce each bucket with ``hook(state, bucket)`` instead of the plain average.

        The hook is called with a ``GradBucket`` and returns a ``Future`` of the flat array to write
        back; it must divide by the number of ranks. A hook that averages over only some of the
        replicas must call ``bucket.set_group``. Raises TypeError when ``hook`` is not callable,
        RuntimeError when a hook was registered before.
        """
        if not callable(hook):
            raise TypeError(f"hook must be callable, got {type(hook).__qualname__}")
        if self._custom_hook:
            raise RuntimeError("a communication hook is registered already; expected only one")
        self._custom_hook = True
        self._set_hook(state, hook)

    def move_to(self, mesh: DeviceMesh) -> None:
        """Continue with the replicas of ``mesh`` along the same dims as before.

        All these ranks must call. The old group is not used again, and gradients are dropped. The
        caller must update the values of parameters and buffers, and any group in the state of a
        communication hook. Raises ValueError when the wrapper was not made over a slice of a mesh
        with names.
        """
        self._ranks = same_dims(self._ranks, mesh, "DistributedDataParallel")
        self.process_group = resolve(self._ranks, "mesh")
        self.discard_saved()
        self._gradients.move_to(self.process_group)

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        optimizer: Any = None,
    ) -> Join:
        """Return a context in which ranks may run out of inputs at different times; see ``Join``.

        Args:
            divide_by_initial_world_size: Divide by the number of all ranks, which gives each sample
                the same weight. If False, divide by the number of ranks that still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: Raise as soon as one rank is out of inputs.
            optimizer: At the end, ranks that stopped early copy this optimizer's state as they do
                the parameters. Needed to continue training with an optimizer that has state. An
                optimizer that communicates itself (``ZeroRedundancyOptimizer``) joins as well.
        """
        joinables: list[Joinable] = [self]
        if isinstance(optimizer, Joinable):
            joinables.append(optimizer)
        elif optimizer is not None:
            joinables.append(OptimizerReplica(optimizer, self.process_group))
        return Join(
            joinables,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group of the replicas."""
        return self.process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one ``Join``; it accepts ``divide_by_initial_world_size``."""
        self._average_over_all = kwargs.get("divide_by_initial_world_size", True)
        return FunctionsHook(self._shadow, lambda _, source: self._copy_from(source))

    def phase_name(self, phase: int) -> str:
        """Return the name of a phase in messages."""
        return _StepPhase(phase).name.lower()

    def _shadow(self, phase: int) -> None:
        assert self.join_context is not None
        if phase == _StepPhase.FORWARD:
            self._broadcast_buffers(self.join_context.first_active)
        else:
            self._gradients.shadow(self._scale)

    def _copy_from(self, source: int) -> None:
        broadcast_coalesced([p.data for p in self.module.parameters()], self.process_group, source)
        self._broadcast_buffers(source)

    def _scale(self, group: ProcessGroup | None) -> float:
        """Return the factor from the average over ``group`` to the average over active ranks."""
        if self.join_context is None or self._average_over_all or group is None:
            return 1.0
        active = len(self.join_context.active_in(group))
        return group.size() / active if active else 1.0

    @property
    def buckets(self) -> list[list[str]]:
        """The paths of the parameters in each bucket, in the order of reduction.

        After the first synchronised step the buckets are rebuilt in the order in which gradients
        became ready. The second step is the first to use these.
        """
        return self._gradients.reducer.buckets

    def _set_hook(self, state: Any, hook: CommHook) -> None:
        dtype = self._precision.reduce_dtype
        self._gradients.reducer.hook = (
            state,
            hook if dtype is None else compress_wrapper(hook, dtype),
        )

    def _broadcast_buffers(self, source: int) -> None:
        buffers = [buffer.data for buffer in self.module.buffers()]
        broadcast_coalesced(buffers, self.process_group, source)
