"""Gathering members' parts of different lengths inside ``jax.jit``, and what that transposes to.

The members are along dim 0, each with as many rows as ``sizes`` says; a batch goes to dim 1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import jax

from meshlib.calls.spec import Run
from meshlib.jit.collective import InJit, front
from meshlib.jit.kinds import HostSide, Issuing, flat_of
from meshlib.jit.program import HostArray
from transport.call import Kind
from transport.operands.reduce_op import ReduceOp


@dataclass(frozen=True)
class _Uneven(Issuing):
    sizes: tuple[int, ...]

    def _parts(self, whole: HostArray, rest: tuple[int, ...]) -> list[HostArray]:
        """Return each member's rows of the whole array, flat."""
        flat, width = flat_of(whole), math.prod(rest)
        ends = [0, *itertools.accumulate(size * width for size in self.sizes)]
        return [flat[begin:end] for begin, end in itertools.pairwise(ends)]

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return front(x, dim, 1), 1


@dataclass(frozen=True)
class UnevenAllGather(_Uneven):
    """From member i's (sizes[i], …) to (sum of sizes, …) on all members."""

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sum(self.sizes), *x.shape[1:]), x.dtype)

    def host_side(self, x: jax.ShapeDtypeStruct) -> HostSide:
        rest = x.shape[1:]

        def work(output: HostArray, x: HostArray) -> Run:
            outputs, flat = self._parts(output, rest), flat_of(x)
            return lambda communicator, call: communicator.all_gather(call, outputs, flat)

        return self._issued(self.call_spec(Kind.ALL_GATHER, work, self.result(x)))

    def transposed(self) -> InJit:
        return UnevenReduceScatter(self.group, self.sizes)


@dataclass(frozen=True)
class UnevenReduceScatter(_Uneven):
    """From (sum of sizes, …) to the sum of member i's rows on it, (sizes[i], …)."""

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.sizes[self.group.rank()], *x.shape[1:]), x.dtype)

    def host_side(self, x: jax.ShapeDtypeStruct) -> HostSide:
        rest = x.shape[1:]

        def work(output: HostArray, x: HostArray) -> Run:
            flat, inputs = flat_of(output), self._parts(x, rest)
            return lambda communicator, call: communicator.reduce_scatter(
                call, flat, inputs, ReduceOp.SUM
            )

        return self._issued(self.call_spec(Kind.REDUCE_SCATTER, work, x, op=ReduceOp.SUM.code))

    def transposed(self) -> InJit:
        return UnevenAllGather(self.group, self.sizes)
