"""The host side of a synchronised backward pass: gradients come out of XLA one by one.

XLA calls ``begin``, then ``arrival(i)`` as soon as gradient i has been computed, on the thread that
computed it. It calls ``seal`` when all gradients are complete, then ``collection(numbers)`` for
one bucket after the other. So the program uses the first averages, for instance to update
parameters, while the last buckets are still being reduced. The reducer starts a bucket's all-reduce
once the bucket is full, in the order of the buckets.

A gradient is copied into its bucket before its ``arrival`` returns: from then on its memory is
XLA's, which may use it or free it.
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
    """The functions that XLA calls in one synchronised backward pass after the other."""

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
        """Return the gradients as they may be collected, in about the order of reduction.

        Each large one is by itself, the small ones, whose buckets may change, are together.
        """
        least = self._options.alone_bytes
        small = [n for n in self._numbers if self._specs[n].nbytes < least]
        large = [[n] for n in self._numbers[::-1] if self._specs[n].nbytes >= least]
        return [*large, small] if small else large

    def begin(self, outputs: Sequence[HostArray], _: Sequence[HostArray], program: Program) -> None:
        """Prepare; the output is a number on which all arrivals depend."""
        outputs[0].fill(0)
        if self._running is not None:
            # Its program was ended by something else, such as a callback of the user's.
            self._abandon(RuntimeError("the program ended before its gradients were reduced"))
        with self._lock:
            self.reducer.begin(self._numbers)
            self._running = program
            self._begun = time.perf_counter()
        program.guard(self._abandon)

    def arrival(self, number: int) -> HostFunction:
        """Return the function that takes the gradient ``number``."""

        def arrive(outputs: Sequence[HostArray], inputs: Sequence[HostArray], _: Program) -> None:
            with self._lock:
                self.reducer.ready(number, inputs[0])
            outputs[0].fill(0)

        return arrive

    def seal(self, _: Sequence[HostArray], inputs: Sequence[HostArray], __: Program) -> None:
        """Note that no gradient arrives any more; returns at once.

        ``inputs[0]`` is a number that depends on all arrivals, so XLA calls this last.
        ``inputs[1:]``, if given, are the gradients by number. They are used for the gradients that
        have not arrived, because the loss does not depend on their parameters.
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
        """End a pass that cannot go on because of ``error``.

        If no bucket is under way, nothing has happened, and the next pass may come.
        """
        with self._lock:
            begun = self._running
            if begun is not None and not self.reducer.under_way:
                self._stand_down()
                return
        if begun is not None:
            self._abandon(error)

    def _end(self) -> None:
        self.reducer.close()
        self.statistics = self.reducer.stopwatch.finish()
        self._stand_down()

    def _stand_down(self) -> None:
        begun, self._running = self._running, None
        if begun is not None:
            begun.unguard(self._abandon)

    def _abandon(self, error: BaseException) -> None:
        """End a pass whose program has failed, on all ranks."""
        self._group.abort(f"a backward pass was broken off by {type(error).__name__}: {error}")
        with self._lock:
            self.reducer.fail(error)
            self._stand_down()

    # What the reducer asks of the owner of gradients

    def accumulated(self, number: int) -> None:
        """Return None: the program keeps what earlier passes have accumulated."""

    def rehome(self, views: Mapping[int, Array]) -> None:
        """Do nothing: XLA decides where gradients live."""

    def deliver(self, averages: Mapping[int, Array]) -> None:
        """Write a bucket's averages into the outputs."""
        for number, average in averages.items():
            self._outputs[number][...] = average
