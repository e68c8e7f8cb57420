"""The reducer: averages gradients bucket by bucket while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshlib import Future, ProcessGroup
from parallel.arrays import Array, namespace, placement
from parallel.ddp.buckets import Bucket, GradBucket, assign_buckets, check_like, put
from parallel.ddp.comm_hooks import allreduce_hook, only
from parallel.ddp.replicas import check_same
from parallel.ddp.statistics import Stopwatch
from parallel.ddp.unused import UnusedParameters
from parallel.nn.parameter import Parameter

WHAT_TO_DO = (
    "To go on, on every rank: make a new group if this one is broken (destroy_process_group, then "
    "init_process_group), wrap the module in a new DistributedDataParallel, and repeat the step or "
    "resume from a checkpoint."
)

Scale = Callable[[ProcessGroup | None], float]
"""What an average over a group (None: a rank's own gradients) is multiplied by."""


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How gradients are bucketed, and which parameters may go unused."""

    first_bytes: int
    cap_bytes: int
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    symmetric_memory: bool = False
    """Buckets are in the group's symmetric memory: they are reduced without a copy. Making buckets
    is a collective then."""


class Reducer:
    """Averages the gradients of ``named`` parameters over ``group``.

    Each parameter's post-accumulate hook tells the reducer that its gradient is complete. Once a
    bucket's gradients are, the bucket is handed to the communication hook, which starts an
    asynchronous all-reduce. Buckets are always handed over in the order of their index, whatever
    the order in which they fill up: so the calls match on all ranks.

    One synchronised backward pass is ``begin()``, the pass itself, ``finish()``; between ``finish``
    and the next ``begin`` hooks are ignored, which is what accumulation without synchronisation
    means.

    Frozen parameters (``requires_grad=False``) are in no bucket. Which are frozen may change
    between passes, on all ranks alike: buckets are then made anew.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        group: ProcessGroup,
        options: ReducerOptions,
    ) -> None:
        self._paths = [path for path, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._group = group
        self._options = options
        self.hook: tuple[Any, Callable[..., Any]] = (None, allreduce_hook)
        """What buckets are reduced with: its state and itself; what it returns is checked."""
        self.after_bucket: Callable[[Sequence[Parameter]], None] | None = None
        """Called with a bucket's parameters once their gradients are averages.

        That is at the end of the pass, bucket by bucket, while later buckets are under way.
        """
        self.stopwatch: Stopwatch = Stopwatch()
        self._active = False
        self._idle = False
        self.failure: str | None = None
        """Why a pass failed, so that there cannot be another one."""
        self._launched: list[tuple[GradBucket, Future[Any]]] = []
        """The buckets that were handed over in this pass, the first ones."""
        self._arrived: dict[int, None] = {}
        """The parameters whose gradients have come, in this order."""
        self._unused: set[int] = set()
        self._rules = UnusedParameters(
            self._paths,
            group,
            find=options.find_unused_parameters,
            static=options.static_graph,
        )
        self._buckets: list[Bucket] = []
        self._live = self._trained()
        self._start_over()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_complete, number))
            for number, parameter in enumerate(self._parameters)
        ]

    @property
    def buckets(self) -> list[list[str]]:
        """The paths of the parameters in each bucket, in the order of reduction."""
        return [[self._paths[number] for number in bucket.numbers] for bucket in self._buckets]

    @property
    def under_way(self) -> bool:
        """Whether a bucket of the pass has been handed over."""
        return bool(self._launched)

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _trained(self) -> list[int]:
        return [n for n, parameter in enumerate(self._parameters) if parameter.requires_grad]

    def _start_over(self) -> None:
        """Make buckets for the parameters that are trained now, with nothing known of them."""
        # With a graph that may change, the order of the first pass says little about the next.
        options = self._options
        self._rebuild_due = not options.find_unused_parameters or options.static_graph
        self._rebuild_order: list[int] | None = None
        self._rules.forget()
        # Gradients tend to come in the reverse of the order in which layers were made.
        self._build(self._live[::-1])

    def _follow(self, live: list[int]) -> None:
        """Freeze and unfreeze parameters as the module now has it. A collective."""
        frozen = set(range(len(self._parameters))) - set(live)
        check_same(
            [f"{path}{' (frozen)' if n in frozen else ''}" for n, path in enumerate(self._paths)],
            self._group,
        )
        for number in frozen & set(self._live):
            self._parameters[number].set_grad_home(None)
        self._live = live
        self._start_over()

    def _assign(self, order: Sequence[int]) -> list[list[int]]:
        """Group the parameters ``order`` into buckets, in the order of reduction."""
        return assign_buckets(
            order,
            [int(parameter.data.nbytes) for parameter in self._parameters],
            self._bucket_keys(),
            self._options.first_bytes,
            self._options.cap_bytes,
        )

    def _build(self, order: Sequence[int]) -> None:
        groups = self._assign(order)
        group = self._group if self._options.symmetric_memory else None
        compression = self._group.compression
        known = {n: part for bucket in self._buckets for n, part in bucket.residuals().items()}
        self._buckets = [
            Bucket(
                i,
                numbers,
                [self._paths[number] for number in numbers],
                [self._parameters[number] for number in numbers],
                group,
            )
            for i, numbers in enumerate(groups)
        ]
        if compression is not None and compression.error_feedback:
            for bucket in self._buckets:
                if isinstance(bucket.buffer, np.ndarray):
                    bucket.keep_residual(known)
        self._where = {
            number: (bucket, slot)
            for bucket in self._buckets
            for slot, number in enumerate(bucket.numbers)
        }
        if self._options.gradient_as_bucket_view:
            for number, (bucket, slot) in self._where.items():
                self._parameters[number].set_grad_home(bucket.views[slot])

    def _bucket_keys(self) -> list[Hashable]:
        """Return a key for each parameter; only parameters with equal ones share a bucket."""
        return [placement(parameter.data) for parameter in self._parameters]

    # One pass

    def begin(self, *, accumulated: bool = False) -> None:
        """Prepare for a backward pass whose forward has run.

        ``accumulated``: a gradient that is there, and waits for no other use, is complete.

        Raises RuntimeError for parameters that the forward did not use, unless unused parameters
        were allowed, and after a pass that failed; ValueError when other ranks froze others.
        """
        self._prepare()
        idle = [number for number in self._live if not self._parameters[number].uses]
        complete = [n for n in idle if accumulated and self._parameters[n].grad is not None]
        unused = set(idle).difference(complete)
        self._rules.check(unused, whole_pass=False)
        self._unused = unused
        self._active = True
        for number in complete[::-1]:
            self._mark_ready(number)
        # Nothing will come for these: their buckets need not wait for the end of the pass.
        for number in sorted(unused, reverse=True):
            self._mark_ready(number)

    def shadow(self, scale: Scale) -> None:
        """Make the calls of a pass of the other ranks, without gradients of this rank's own.

        This rank counts as one with gradients of zero; the averages are written here as well.
        """
        self._prepare()
        self._unused = set(self._live)
        self._idle = True
        for number in self._live:
            self._parameters[number].grad = None
        for bucket in list(self._buckets):
            for number in bucket.numbers:
                self._mark_ready(number)
        self.finish(scale)

    def _prepare(self) -> None:
        if self.failure is not None:
            raise RuntimeError(
                f"an earlier backward pass failed on this rank ({self.failure}), so the ranks "
                f"are no longer in step. {WHAT_TO_DO}"
            )
        live = self._trained()
        if live != self._live:
            self._follow(live)
        if self._rebuild_order is not None:
            self._build(self._agree(self._rebuild_order))
            self._rebuild_order = None
        for bucket in self._buckets:
            bucket.pending = len(bucket.numbers)
        self._launched = []
        self._arrived = {}
        self._idle = False
        self.stopwatch.begin()

    def finish(self, scale: Scale) -> None:
        """Wait for all buckets and write the averages into the gradients.

        ``scale(group)`` is what an average over ``group`` is multiplied by.

        Raises RuntimeError when gradients are missing and unused parameters were not allowed, and
        what the communication raised.
        """
        absent = self.seal()
        for bucket in self._buckets:
            self._settle(bucket, absent, scale)
        self.close()

    def seal(self) -> set[int]:
        """End the pass: no gradient will come any more. Return those that came on no rank."""
        if not self._idle:
            missing = set(self._live).difference(self._arrived)
            self._unused |= missing
            self._rules.check(self._unused, whole_pass=True)
            for number in sorted(missing, reverse=True):
                self._mark_ready(number)
            self._rules.learn(self._unused)
        self._active = False
        return self._rules.absent_everywhere(self._present(), namespace(self._parameters[0].data))

    def _settle(self, bucket: Bucket, absent: set[int], scale: Scale | None = None) -> None:
        """Wait for a bucket and hand out what it holds."""
        handed, future = self._launched[bucket.index]
        self._store(bucket, future)
        bucket.take_back(absent)
        factor = 1.0 if scale is None else scale(handed.group)
        if factor != 1.0:
            bucket.buffer *= factor
        self._deliver(bucket, absent)

    def close(self) -> None:
        """Note what the pass, all of whose buckets are settled, says about the next."""
        if self._rebuild_due:
            # Unused parameters close their buckets last, where they delay nothing.
            self._rebuild_order = sorted(self._arrived, key=lambda number: number in self._unused)
            self._rebuild_due = False

    def fail(self, error: BaseException) -> None:
        """Give up on the pass under way because of ``error``, and on all later ones."""
        self._active = False
        self.failure = f"{type(error).__name__}: {error}"
        self.detach()

    def _on_complete(self, number: int, _: Parameter) -> None:
        if self._active:
            self._mark_ready(number)

    def _mark_ready(self, number: int) -> None:
        if number in self._arrived:
            raise RuntimeError(
                f"the gradient of {self._paths[number]} was completed twice in one backward pass"
            )
        self._arrived[number] = None
        bucket, slot = self._where[number]
        self._collect(bucket, slot, self._parameters[number].grad)
        bucket.pending -= 1
        while len(self._launched) < len(self._buckets):
            following = self._buckets[len(self._launched)]
            if following.pending:
                break
            self._launch(following)

    def _collect(self, bucket: Bucket, slot: int, grad: Array | None) -> None:
        put(bucket.views[slot], grad)

    def _launch(self, bucket: Bucket) -> None:
        bucket.remember(self._unused)
        is_last = bucket.index == len(self._buckets) - 1
        handed = GradBucket(bucket, is_last, self._group)
        state, hook = self.hook
        future = hook(state, handed)
        if not isinstance(future, Future):
            raise TypeError(
                f"the communication hook must return a Future, got {type(future).__qualname__} "
                f"for bucket {bucket.index}"
            )
        self._launched.append((handed, future))
        self.stopwatch.watch(future)

    def _store(self, bucket: Bucket, future: Future[Any]) -> None:
        value = only(future.wait())
        if value is not bucket.buffer:
            what = f"the communication hook's result for bucket {bucket.index}"
            check_like(value, bucket.buffer, what)
            bucket.buffer[...] = value

    def _deliver(self, bucket: Bucket, absent: set[int]) -> None:
        """Hand out what a bucket holds, to the parameters that have a gradient on any rank."""
        present: list[Parameter] = []
        for number, parameter, view in zip(
            bucket.numbers, bucket.parameters, bucket.views, strict=True
        ):
            if number not in absent:
                self._write_back(parameter, view)
                present.append(parameter)
        if self.after_bucket is not None:
            self.after_bucket(present)

    def _write_back(self, parameter: Parameter, average: Array) -> None:
        if self._options.gradient_as_bucket_view:
            parameter.grad = average
        elif parameter.grad is None:
            parameter.grad = average.copy()
        else:
            parameter.grad[...] = average

    def _present(self) -> list[bool]:
        """Say for each parameter whether this rank contributes to its gradient."""
        # A gradient that accumulated in earlier, unsynchronised passes counts as well.
        return [
            parameter.requires_grad and (number not in self._unused or parameter.grad is not None)
            for number, parameter in enumerate(self._parameters)
        ]

    def _agree(self, order: Sequence[int]) -> list[int]:
        """Return group rank 0's ``order``: gradients may have come in another one elsewhere."""
        numbers = namespace(self._parameters[0].data).asarray(order, dtype="int64")
        self._group.broadcast(numbers, group_src=0)
        return numbers.tolist()
