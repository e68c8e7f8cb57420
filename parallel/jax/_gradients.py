"""The host side of a synchronised backward pass: gradients come out of XLA one by one.

XLA calls ``begin``, then ``arrival(i)`` as soon as gradient i has been computed, on whatever
thread it computes on, ``seal`` when all are there, and ``collection(numbers)`` for one bucket after
the other: what the program does with the averages of the first ones, such as updating parameters,
goes on while the last ones are under way. The reducer starts a bucket's all-reduce once the bucket
is full, in the order of the buckets.

A large gradient is a bucket of its own and is reduced where XLA has put it, with no copy, while
XLA computes the next ones: to XLA the call's result, which is that memory, is not used by anybody
before its collection. This rests on the results of ``arrival`` and ``seal`` and the operand of the
collection being the same memory, which XLA decides once, when it compiles. So the first run of a
program copies, and compares the addresses; later runs work in place if they were the same (and
still compare). And it rests on nobody else ending the program in between, when XLA would free the
memory: a program with callbacks of the user's, which may raise, is always run with copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import jax
import numpy as np

from meshlib import ProcessGroup
from meshlib.extend.jit import HostArray, HostFunction, Program
from parallel._arrays import Array, address
from parallel._core.buckets import GradientSpec, ReducerOptions
from parallel._core.passes import PassStatistics
from parallel._core.reducer import Reducer


class GradientExchange:
    """The functions that XLA calls in one synchronised backward pass after the other.

    Gradients are XLA's buffers. A reducer averages them, the large ones where they are.
    """

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
        self.share_in_place: float = 0.0
        """The share of the gradients' bytes that the last pass reduced without a copy."""
        self.statistics: PassStatistics | None = None
        self._borrowed = set(self.reducer.borrowed())
        self._outputs: Mapping[int, HostArray] = {}
        self._lock = threading.Lock()
        self._same_memory: WeakKeyDictionary[Program, bool] = WeakKeyDictionary()
        self._addresses: dict[int, int] = {}
        self._begun = 0.0
        self._same = True
        self._in_place = False
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
        small = [number for number in self._numbers if number not in self._borrowed]
        large = [[number] for number in self.reducer.borrowed()]
        return [*large, small] if small else large

    def begin(self, outputs: Sequence[HostArray], _: Sequence[HostArray], program: Program) -> None:
        """Prepare; the output is a number on which all arrivals depend."""
        outputs[0].fill(0)
        if self._running is not None:
            # Its program was ended by something else, such as a callback of the user's.
            self._abandon(RuntimeError("the program ended before its gradients were reduced"))
        with self._lock:
            self._in_place = program.is_ours and self._same_memory.get(program, False)
            self._addresses.clear()
            self.share_in_place = 0.0
            self.reducer.begin(self._numbers)
            self._running = program
            self._begun = time.perf_counter()
        program.guard(self._abandon)

    def arrival(self, number: int) -> HostFunction:
        """Return what takes the gradient ``number``."""

        def arrive(outputs: Sequence[HostArray], _: Sequence[HostArray], program: Program) -> None:
            gradient = outputs[0]
            with self._lock:
                if program is not self._running:  # called outside of jit, operation by operation
                    gradient = gradient.copy()
                self._take(number, gradient)

        return arrive

    def seal(
        self, outputs: Sequence[HostArray], inputs: Sequence[HostArray], program: Program
    ) -> None:
        """Note that all gradients are there; returns at once.

        ``inputs`` are the gradients and, if there are any, what was accumulated before: arrivals
        have that in them already.
        """
        with self._lock:
            self.reducer.stopwatch.add_backward(self._begun)
            self._same = True
            for number in self._addresses:
                self._compare_memory(number, inputs[number], outputs[number])
            accumulated = inputs[len(outputs) :]
            for number, gradient in enumerate(outputs):
                if self.reducer.arrived(number):
                    continue
                # The loss does not depend on this parameter.
                if accumulated:
                    np.add(gradient, accumulated[number], out=gradient)
                self._take(number, gradient)
            self.reducer.seal()

    def collection(self, numbers: Sequence[int], *, last: bool) -> HostFunction:
        """Return what replaces the gradients ``numbers`` by the averages, once they are there."""

        def collect(
            outputs: Sequence[HostArray], inputs: Sequence[HostArray], program: Program
        ) -> None:
            with self._lock:
                for number, before, after in zip(numbers, inputs, outputs, strict=True):
                    self._compare_memory(number, before, after)
                self._outputs = dict(zip(numbers, outputs, strict=True))
                self.reducer.settle(numbers)
                self._outputs = {}
                if last:
                    self._end(program)

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

    def _take(self, number: int, gradient: HostArray) -> None:
        """Tell the reducer that a gradient is complete: a copy of a large one, unless in place."""
        self._addresses[number] = address(gradient)
        if number in self._borrowed:
            if self._in_place:
                total = sum(spec.nbytes for spec in self._specs)
                self.share_in_place += gradient.nbytes / total
            else:
                gradient = gradient.copy()
        self.reducer.ready(number, gradient)

    def _end(self, program: Program) -> None:
        self.reducer.close()
        self._same_memory[program] = self._same
        self.statistics = self.reducer.stopwatch.finish()
        self._stand_down()

    def _stand_down(self) -> None:
        begun, self._running = self._running, None
        if begun is not None:
            begun.unguard(self._abandon)

    def _compare_memory(self, number: int, before: HostArray, after: HostArray) -> None:
        if address(before) == address(after) == self._addresses[number]:
            return
        self._same = False
        if self._in_place:
            raise RuntimeError(
                "XLA moved a gradient while it was being reduced, which it did not in this "
                "program's first run; its values cannot be trusted"
            )

    def _abandon(self, error: BaseException) -> None:
        """Stop all work on XLA's memory: the program has failed, and XLA will free it."""
        self._group.abort(f"a backward pass was broken off by {type(error).__name__}: {error}")
        with self._lock:
            self.reducer.fail(error)
            self.reducer.let_go()
            self._stand_down()

    # What the reducer asks of the owner of gradients

    def accumulated(self, number: int) -> None:
        """Return None: the program keeps what earlier passes have accumulated."""

    def rehome(self, views: Mapping[int, Array]) -> None:
        """Do nothing: XLA decides where gradients live."""

    def deliver(self, averages: Mapping[int, Array]) -> None:
        """Write a bucket's averages into the outputs, unless they are there."""
        for number, average in averages.items():
            output = self._outputs[number]
            if address(output) != address(average):
                output[...] = average
