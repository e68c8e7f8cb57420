"""``Reducer``: averages gradients in buckets while the backward pass computes further gradients.

The wrapper reports each complete gradient. A full bucket is passed to the communication hook, which
starts an asynchronous all-reduce. ``finish`` waits for all of them and delivers the averages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from meshlib import Future, ProcessGroup
from parallel._arrays import Array
from parallel._core.buckets import (
    Bucket,
    BucketSet,
    GradientOwner,
    GradientSpec,
    ReducerOptions,
    put,
)
from parallel._core.comm_hooks import GradBucket, allreduce_hook, check_like, only
from parallel._core.passes import Stopwatch, UnusedParameters
from parallel._core.replicas import check_same

WHAT_TO_DO = (
    "To continue, on every rank: make a new group if this one is broken (destroy_process_group, "
    "then init_process_group), wrap the module in a new DistributedDataParallel, and repeat the "
    "step or resume from a checkpoint."
)

Scale = Callable[[ProcessGroup | None], float]
"""Returns the factor for the average over a group (None: for a rank's own gradients)."""


class Reducer:
    """Averages gradients over ``group``, and delivers the averages to their ``owner``.

    ``specs`` describe the gradients; a gradient's number is its index there. ``ready(i, array)``
    reports that gradient i is complete. A full bucket is passed to the communication hook, which
    starts an asynchronous all-reduce. The hook gets the buckets in order of their index, even if
    they fill up in another order, so the calls match on all ranks.

    A synchronised backward pass is ``begin()``, the calls of ``ready``, then ``finish()``. Calls of
    ``ready`` between ``finish`` and the next ``begin`` are ignored: gradients accumulate without
    communication.

    Frozen parameters are in no bucket. Freezing and unfreezing between passes, which must be the
    same on all ranks, rebuilds the buckets.
    """

    def __init__(
        self,
        specs: Sequence[GradientSpec],
        group: ProcessGroup,
        options: ReducerOptions,
        owner: GradientOwner,
        trained: Sequence[int],
    ) -> None:
        self._specs = specs
        self._group = group
        self._options = options
        self._owner = owner
        self.hook: tuple[Any, Callable[..., Any]] = (None, allreduce_hook)
        """The communication hook, as (its state, the function). Its result is checked."""
        self.stopwatch: Stopwatch = Stopwatch()
        self.failure: str | None = None
        """The error of a failed pass, or None. After a failure no other pass can begin."""
        self._active = False
        self._idle = False
        self._launched: list[tuple[GradBucket, Future[Any]]] = []
        """The buckets that the hook got in this pass, in order of their index."""
        self._arrived: dict[int, None] = {}
        """The numbers of the complete gradients, in the order in which they became complete."""
        self._unused: set[int] = set()
        self._absent: set[int] = set()
        """The numbers of the gradients that no rank has computed."""
        self._rules = UnusedParameters(
            [spec.name for spec in specs],
            group,
            find=options.find_unused_parameters,
            static=options.static_graph,
        )
        self._buckets = BucketSet(specs, group, options)
        self._trained = list(trained)
        self._start_over()

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the gradients in each bucket, in the order of reduction."""
        return [[spec.name for spec in bucket.specs] for bucket in self._buckets.all]

    @property
    def under_way(self) -> bool:
        """True if a bucket was passed to the hook in this pass."""
        return bool(self._launched)

    def residuals(self) -> dict[int, Array]:
        """Return the rounding errors for error feedback by the gradients' numbers."""
        return self._buckets.residuals()

    # Buckets

    def _start_over(self) -> None:
        """Make buckets for the currently trained parameters, without data from earlier passes."""
        # If the graph may change, the order in the first pass does not predict later ones.
        options = self._options
        self._rebuild_due = not options.find_unused_parameters or options.static_graph
        self._rebuild_order: list[int] | None = None
        self._rules.forget()
        # Gradients tend to arrive in the reverse of the order in which layers were made.
        self._build(self._trained[::-1])

    def _follow(self, trained: Sequence[int]) -> None:
        """Rebuild the buckets for the ``trained`` parameters. A collective."""
        frozen = set(range(len(self._specs))).difference(trained)
        names = [f"{s.name}{' (frozen)' if n in frozen else ''}" for n, s in enumerate(self._specs)]
        check_same(names, self._group)
        self._trained = list(trained)
        self._start_over()

    def _build(self, order: Sequence[int]) -> None:
        self._buckets.build(order)
        self._owner.rehome({n: v for bucket in self._buckets.all for n, v in bucket.views.items()})

    # One pass

    def begin(self, trained: Sequence[int], unused: Collection[int] = ()) -> None:
        """Begin a backward pass that computes the gradients ``trained`` except ``unused``.

        Raises RuntimeError when unused parameters are not allowed, and after a failed pass;
        ValueError when the ranks train different parameters.
        """
        self._prepare(trained)
        self._unused = set(unused)
        self._rules.check(self._unused, whole_pass=False)
        self._active = True
        # No gradient will arrive for these, so their buckets need not wait until the pass ends.
        self._fill_in(self._unused)

    def shadow(self, trained: Sequence[int], scale: Scale) -> None:
        """Join in the collectives of the other ranks' pass without computing gradients.

        This rank contributes its accumulated gradients or zeros; its owner gets the averages too.
        """
        self._prepare(trained)
        self._unused = set(trained)
        self._idle = True
        for bucket in list(self._buckets.all):
            for number in bucket.numbers:
                self._mark_ready(number, self._owner.accumulated(number))
        self.finish(scale)

    def _prepare(self, trained: Sequence[int]) -> None:
        if self.failure is not None:
            raise RuntimeError(
                f"an earlier backward pass failed on this rank ({self.failure}), so the ranks "
                f"are no longer in step. {WHAT_TO_DO}"
            )
        if list(trained) != self._trained:
            self._follow(trained)
        if self._rebuild_order is not None:
            self._build(self._buckets.agree(self._rebuild_order))
            self._rebuild_order = None
        for bucket in self._buckets.all:
            bucket.pending = len(bucket.numbers)
        self._launched = []
        self._arrived = {}
        self._idle = False
        self.stopwatch.begin()

    def ready(self, number: int, grad: Array | None) -> None:
        """Accept the complete gradient ``number``; None: zeros. Ignored outside of a pass.

        Raises RuntimeError if it has arrived in this pass already.
        """
        if self._active:
            self._mark_ready(number, grad)

    def arrived(self, number: int) -> bool:
        """True if the gradient has arrived in this pass."""
        return number in self._arrived

    def finish(self, scale: Scale) -> None:
        """Wait for all buckets and deliver the averages.

        ``scale(group)`` is the factor for an average over ``group``.

        Raises RuntimeError when gradients are missing and unused parameters are not allowed, and
        the errors of the communication.
        """
        self.seal()
        self.settle(self._trained, scale)
        self.close()

    def seal(self) -> None:
        """End the arrivals of the pass, and fill in gradients that have not arrived."""
        if not self._idle:
            missing = set(self._trained).difference(self._arrived)
            self._unused |= missing
            self._rules.check(self._unused, whole_pass=True)
            self._fill_in(missing)
            self._rules.learn(self._unused)
        self._active = False
        trained = set(self._trained)
        # A gradient that accumulated in earlier, unsynchronised passes counts as present.
        present = [
            n in trained and (n not in self._unused or self._owner.accumulated(n) is not None)
            for n in range(len(self._specs))
        ]
        self._absent = self._rules.absent_everywhere(present, self._specs[0].library)

    def settle(self, numbers: Sequence[int], scale: Scale | None = None) -> None:
        """Wait for the buckets of the gradients ``numbers``, and deliver their averages."""
        buckets = {self._buckets.where[number] for number in numbers}
        for bucket in sorted(buckets, key=lambda bucket: bucket.index):
            grad_bucket, future = self._launched[bucket.index]
            self._store(bucket, future)
            bucket.restore(self._absent)
            factor = 1.0 if scale is None else scale(grad_bucket.group)
            if factor != 1.0:
                bucket.buffer *= factor
            # The owner keeps its gradient of a parameter for which no rank has computed one.
            self._owner.deliver({n: v for n, v in bucket.views.items() if n not in self._absent})

    def close(self) -> None:
        """End a pass whose buckets are settled; the first pass orders the rebuilt buckets."""
        if self._rebuild_due:
            # Unused parameters are last, where they do not delay other buckets.
            self._rebuild_order = sorted(self._arrived, key=lambda number: number in self._unused)
            self._rebuild_due = False
        self._launched = []

    def fail(self, error: BaseException) -> None:
        """Abort the current pass because of ``error``, and make all later ones fail."""
        self._active = False
        self.failure = f"{type(error).__name__}: {error}"

    def _fill_in(self, numbers: Collection[int]) -> None:
        """Complete gradients that do not arrive by those accumulated in earlier passes."""
        for number in sorted(numbers, reverse=True):
            self._mark_ready(number, self._owner.accumulated(number))

    def _mark_ready(self, number: int, grad: Array | None) -> None:
        if number in self._arrived:
            raise RuntimeError(
                f"the gradient of {self._specs[number].name} was completed twice in one backward "
                "pass"
            )
        self._arrived[number] = None
        bucket = self._buckets.where[number]
        put(bucket.views[number], grad)
        bucket.pending -= 1
        while len(self._launched) < len(self._buckets.all):
            next_bucket = self._buckets.all[len(self._launched)]
            if next_bucket.pending:
                break
            self._launch(next_bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.remember(self._unused)
        is_last = bucket.index == len(self._buckets.all) - 1
        grad_bucket = GradBucket(bucket, is_last, self._group)
        state, hook = self.hook
        future = hook(state, grad_bucket)
        if not isinstance(future, Future):
            raise TypeError(
                f"the communication hook must return a Future, got {type(future).__qualname__} "
                f"for bucket {bucket.index}"
            )
        self._launched.append((grad_bucket, future))
        self.stopwatch.watch(future)

    def _store(self, bucket: Bucket, future: Future[Any]) -> None:
        value = only(future.wait())
        if value is not bucket.buffer:
            what = f"the communication hook's result for bucket {bucket.index}"
            check_like(value, bucket.buffer, what)
            bucket.buffer[...] = value
