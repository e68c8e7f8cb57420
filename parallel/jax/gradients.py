"""The host side of a synchronised backward pass: gradients come out of XLA one by one.

XLA calls ``begin``, then ``arrival(i)`` as soon as gradient i has been computed, on whatever
thread it computes on, ``seal`` when all are there, and ``collection(numbers)`` for one bucket after
the other: what the program does with the averages of the first ones, such as updating parameters,
goes on while the last ones are under way. The reducer is the one of NumPy modules: it starts a
bucket's all-reduce once the bucket is full, in the order of the buckets.

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
from collections.abc import Hashable, Mapping, Sequence
from weakref import WeakKeyDictionary

import jax
import numpy as np

from meshlib import ProcessGroup, WaitTimeoutError
from meshlib.jit import HostArray, HostFunction, Program
from parallel.arrays import Array
from parallel.ddp.buckets import Bucket
from parallel.ddp.reducer import Reducer, ReducerOptions
from parallel.ddp.statistics import PassStatistics
from parallel.nn.parameter import Parameter
from transport.operands.copying import address

# How long an all-reduce that was broken off may take to let go of its memory.
_LET_GO_SECONDS = 5.0


def _stand_in(spec: jax.ShapeDtypeStruct) -> Parameter:
    """Return a parameter of the given shape and dtype that takes no memory for its values."""
    return Parameter(np.broadcast_to(np.zeros((), spec.dtype), spec.shape))


class XlaReducer(Reducer):
    """A reducer whose gradients are XLA's buffers."""

    def __init__(
        self,
        named: Sequence[tuple[str, jax.ShapeDtypeStruct]],
        group: ProcessGroup,
        options: ReducerOptions,
    ) -> None:
        self.in_place = False
        self.share_in_place: float = 0.0
        self._large_bytes = options.first_bytes
        super().__init__([(path, _stand_in(spec)) for path, spec in named], group, options)
        self._total_bytes = self._nbytes(range(len(named)))

    def begin(self, *, accumulated: bool = False) -> None:
        """Prepare for a pass in which every parameter's gradient will come."""
        self.share_in_place = 0.0
        for parameter in self._parameters:
            parameter.uses = 0
            parameter.grad = None
            parameter.expect_grad()
        super().begin(accumulated=accumulated)

    def arrive(self, number: int, gradient: HostArray) -> None:
        """Take the gradient of one parameter, which is complete."""
        self._parameters[number].accumulate_grad(gradient)

    def arrived(self, number: int) -> bool:
        """Whether the gradient of one parameter has come in this pass."""
        return number in self._arrived

    def collect(self, outputs: Mapping[int, HostArray]) -> None:
        """Wait for the parameters' buckets, and put the averages into ``outputs``.

        One of ``portions``.
        """
        for number, output in outputs.items():
            self._parameters[number].grad = output
        for index in sorted({self._where[number][0].index for number in outputs}):
            self._settle(self._buckets[index], set())

    def close(self) -> None:
        """End a pass, all of whose gradients were collected."""
        super().close()
        self._forget()

    def portions(self) -> list[list[int]]:
        """Return the parameters as they may be collected, in about the order of reduction.

        Each large one is by itself, the small ones, whose buckets may change, are together.
        """
        large = [bucket.numbers for bucket in self._buckets if self._is_large(bucket)]
        alone = {number for numbers in large for number in numbers}
        small = [number for number in range(len(self._parameters)) if number not in alone]
        return [*large, small] if small else large

    def let_go(self, error: BaseException) -> None:
        """Return when no call works on XLA's memory any more; the group has been broken."""
        self.fail(error)
        for _, future in self._launched:
            try:
                future.block(_LET_GO_SECONDS, lambda: "a reduction that was broken off")
            except WaitTimeoutError:
                continue
        self._forget()

    def _forget(self) -> None:
        """Drop all views of XLA's memory, which is valid only during the program."""
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            if self._is_large(bucket):
                bucket.buffer, bucket.views = None, [None]
        self._launched = []

    def _assign(self, order: Sequence[int]) -> list[list[int]]:
        # XLA's order changes from run to run, and a bucket of small gradients from all over the
        # model is complete late. Elsewhere than at the end, where it is soon reduced, large ones
        # that are complete would wait for it.
        groups = super()._assign(order)
        return sorted(groups, key=lambda numbers: self._nbytes(numbers) < self._large_bytes)

    def _nbytes(self, numbers: Sequence[int]) -> int:
        return sum(int(self._parameters[number].data.nbytes) for number in numbers)

    def _bucket_keys(self) -> list[Hashable]:
        # A large gradient shares its bucket with no other, so that it can stay where it is.
        return [
            (key, number) if self._parameters[number].data.nbytes >= self._large_bytes else key
            for number, key in enumerate(super()._bucket_keys())
        ]

    def _is_large(self, bucket: Bucket) -> bool:
        return bucket.parameters[0].data.nbytes >= self._large_bytes

    def _collect(self, bucket: Bucket, slot: int, grad: Array | None) -> None:
        if not self._is_large(bucket):
            super()._collect(bucket, slot, grad)
            return
        assert grad is not None, "every gradient comes"
        if self.in_place:
            self.share_in_place += grad.nbytes / self._total_bytes
        home = grad if self.in_place else grad.copy()
        bucket.buffer, bucket.views = home.reshape(-1), [home]

    def _write_back(self, parameter: Parameter, average: Array) -> None:
        target = parameter.grad
        assert target is not None, "collect() has set it"
        if address(target) != address(average):
            target[...] = average


class GradientExchange:
    """The functions that XLA calls in one synchronised backward pass after the other."""

    def __init__(self, reducer: XlaReducer, group: ProcessGroup) -> None:
        self.reducer: XlaReducer = reducer
        self.statistics: PassStatistics | None = None
        self._group = group
        self._lock = threading.Lock()
        self._same_memory: WeakKeyDictionary[Program, bool] = WeakKeyDictionary()
        self._addresses: dict[int, int] = {}
        self._begun = 0.0
        self._same = True
        self._running: Program | None = None

    def begin(self, outputs: Sequence[HostArray], _: Sequence[HostArray], program: Program) -> None:
        """Prepare; the output is a number on which all arrivals depend."""
        outputs[0].fill(0)
        if self._running is not None:
            # Its program was ended by something else, such as a callback of the user's.
            self._abandon(RuntimeError("the program ended before its gradients were reduced"))
        with self._lock:
            self.reducer.in_place = program.is_ours and self._same_memory.get(program, False)
            self._addresses.clear()
            self.reducer.begin()
            self._running = program
            self._begun = time.perf_counter()
        program.guard(self._abandon)

    def move_to(self, reducer: XlaReducer, group: ProcessGroup) -> None:
        """Go on with another ``reducer``, over ``group``: between two passes."""
        with self._lock:
            self.reducer, self._group = reducer, group
            self._running = None

    def arrival(self, number: int) -> HostFunction:
        """Return what takes the gradient ``number``."""

        def arrive(outputs: Sequence[HostArray], _: Sequence[HostArray], program: Program) -> None:
            gradient = outputs[0]
            with self._lock:
                if program is not self._running:  # called outside of jit, operation by operation
                    gradient = gradient.copy()
                self._addresses[number] = address(gradient)
                self.reducer.arrive(number, gradient)

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
                self._addresses[number] = address(gradient)
                self.reducer.arrive(number, gradient)
            self.reducer.seal()

    def collection(self, numbers: Sequence[int], *, last: bool) -> HostFunction:
        """Return what replaces the gradients ``numbers`` by the averages, once they are there."""

        def collect(
            outputs: Sequence[HostArray], inputs: Sequence[HostArray], program: Program
        ) -> None:
            with self._lock:
                for number, before, after in zip(numbers, inputs, outputs, strict=True):
                    self._compare_memory(number, before, after)
                self.reducer.collect(dict(zip(numbers, outputs, strict=True)))
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
        if self.reducer.in_place:
            raise RuntimeError(
                "XLA moved a gradient while it was being reduced, which it did not in this "
                "program's first run; its values cannot be trusted"
            )

    def _abandon(self, error: BaseException) -> None:
        """Stop all work on XLA's memory: the program has failed, and XLA will free it."""
        self._group.abort(f"a backward pass was broken off by {type(error).__name__}: {error}")
        with self._lock:
            self.reducer.let_go(error)
            self._stand_down()
