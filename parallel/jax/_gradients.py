"""The host side of a synchronised backward pass, to which XLA passes gradients one by one.

XLA calls ``begin``, then ``arrival(i)`` on the computing thread as soon as gradient i is computed.
After all gradients it calls ``seal``, then ``collection(numbers)`` for each bucket in turn. Thus
the program can use the first averages, for example to update parameters, while later buckets are
still being reduced. The reducer starts each full bucket's all-reduce, in the order of the buckets.

``arrival`` copies the gradient into its bucket before it returns, because XLA may reuse or free
the gradient's memory afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from meshlib import ProcessGroup
from meshlib.extend.jit import HostArray, HostFunction, Program
from parallel._arrays import Array
from parallel._core.buckets import GradientSpec, ReducerOptions
from parallel._core.passes import PassStatistics
from parallel._core.reducer import Reducer


class GradientExchange:
    """The functions that XLA calls in each synchronised backward pass."""

    def __init__(
        self,
        named: Sequence[tuple[str, jax.ShapeDtypeStruct]],
        group: ProcessGroup,
        options: ReducerOptions,
    ) -> None:
        self._specs = [
            GradientSpec(path, spec.shape, np.dtype(spec.dtype), parameter=spec)
            for path, spec in named
        ]
        self._group, self._options = group, options
        self._numbers = range(len(named))
        self.reducer: Reducer = Reducer(self._specs, group, options, self, self._numbers)
        self.statistics: PassStatistics | None = None
        self._outputs: Mapping[int, HostArray] = {}
        self._lock = threading.Lock()
        self._begun = 0.0
        self._running: Program | None = None

    def move_to(self, group: ProcessGroup) -> None:
        """Average over ``group`` from the next pass on."""
        with self._lock:
            hook = self.reducer.hook
            self.reducer = Reducer(self._specs, group, self._options, self, self._numbers)
            self.reducer.hook = hook
            self._group, self._running = group, None

    def portions(self) -> list[list[int]]:
        """Return the numbers of gradients to collect together, roughly in order of reduction.

        Each large gradient is alone. The small ones are together, because their buckets may change.
        """
        least = self._options.alone_bytes
        small = [n for n in self._numbers if self._specs[n].nbytes < least]
        large = [[n] for n in self._numbers[::-1] if self._specs[n].nbytes >= least]
        return [*large, small] if small else large

    def begin(self, outputs: Sequence[HostArray], _: Sequence[HostArray], program: Program) -> None:
        """Begin a pass; the output is a number on which all arrivals depend."""
        outputs[0].fill(0)
        if self._running is not None:
            # Another failure, such as in a user's callback, ended the previous program.
            self._abandon(RuntimeError("the program ended before its gradients were reduced"))
        with self._lock:
            self.reducer.begin(self._numbers)
            self._running = program
            self._begun = time.perf_counter()
        program.guard(self._abandon)

    def arrival(self, number: int) -> HostFunction:
        """Return the function that receives the gradient ``number``."""

        def arrive(outputs: Sequence[HostArray], inputs: Sequence[HostArray], _: Program) -> None:
            with self._lock:
                self.reducer.ready(number, inputs[0])
            outputs[0].fill(0)

        return arrive

    def seal(self, _: Sequence[HostArray], inputs: Sequence[HostArray], __: Program) -> None:
        """Mark the end of the arrivals, without waiting for reductions.

        ``inputs[0]`` depends on all arrivals, so XLA calls this after them. ``inputs[1:]``, if
        present, are gradients by number, for those that have not arrived because the loss does not
        depend on their parameters.
        """
        with self._lock:
            self.reducer.stopwatch.add_backward(self._begun)
            others = inputs[1:]
            for number in self._numbers:
                if not self.reducer.arrived(number):
                    self.reducer.ready(number, others[number] if others else None)
            self.reducer.seal()

    def collection(self, numbers: Sequence[int], *, last: bool) -> HostFunction:
        """Return the function that writes the averages of the gradients ``numbers``."""

        def collect(outputs: Sequence[HostArray], _: Sequence[HostArray], __: Program) -> None:
            with self._lock:
                self._outputs = dict(zip(numbers, outputs, strict=True))
                self.reducer.settle(numbers)
                self._outputs = {}
                if last:
                    self._end()

        return collect

    def cancel(self, error: BaseException) -> None:
        """End a pass that cannot continue because of ``error``.

        If no reduction has started, the pass has no effect, and another one may begin.
        """
        with self._lock:
            begun = self._running
            if begun is not None and not self.reducer.under_way:
                self._clear_running()
                return
        if begun is not None:
            self._abandon(error)

    def _end(self) -> None:
        self.reducer.close()
        self.statistics = self.reducer.stopwatch.finish()
        self._clear_running()

    def _clear_running(self) -> None:
        begun, self._running = self._running, None
        if begun is not None:
            begun.unguard(self._abandon)

    def _abandon(self, error: BaseException) -> None:
        """End, on all ranks, a pass whose program has failed."""
        self._group.abort(f"a backward pass was aborted by {type(error).__name__}: {error}")
        with self._lock:
            self.reducer.fail(error)
            self._clear_running()

    # The reducer's GradientOwner protocol

    def accumulated(self, number: int) -> None:
        """Return None: the program itself holds accumulated gradients."""

    def rehome(self, views: Mapping[int, Array]) -> None:
        """Do nothing: XLA allocates the gradients."""

    def deliver(self, averages: Mapping[int, Array]) -> None:
        """Write a bucket's averages into the outputs."""
        for number, average in averages.items():
            self._outputs[number][...] = average
