"""A gather of parts of different lengths inside ``jax.jit``, and its transpose.

Parts are joined along dim 0, with ``sizes[i]`` rows of member i; a batch is along dim 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from meshlib.jit._collective import InJit
from meshlib.jit._kinds import Issuing, flat_of
from meshlib.jit._xla.program import HostArray
from transport._calls.header import Kind
from transport._operands.reduce_op import ReduceOp


@dataclass(frozen=True)
class _Uneven(Issuing):
    sizes: tuple[int, ...]

    def _parts(self, whole: HostArray) -> list[HostArray]:
        """Return each member's rows of the whole array, flat."""
        flat, rows = flat_of(whole), sum(self.sizes)
        width = flat.size // rows if rows else 0
        ends = [0, *itertools.accumulate(size * width for size in self.sizes)]
        return [flat[begin:end] for begin, end in itertools.pairwise(ends)]

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        return jnp.moveaxis(x, dim, 1), 1


@dataclass(frozen=True)
class UnevenAllGather(_Uneven):
    """A gather of each member's (sizes[i], …) to (sum of sizes, …) on all members."""

    kind = Kind.ALL_GATHER
    counts_result = True

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sum(self.sizes), *x.shape[1:]), x.dtype)

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return self._parts(output), flat_of(x)

    def transposed(self) -> InJit:
        return UnevenReduceScatter(self.group, self.sizes)


@dataclass(frozen=True)
class UnevenReduceScatter(_Uneven):
    """A reduction of (sum of sizes, …) that returns member i's rows, (sizes[i], …), to member i."""

    kind = Kind.REDUCE_SCATTER
    op: ReduceOp = ReduceOp.SUM

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.sizes[self.group.rank()], *x.shape[1:]), x.dtype)

    def arguments(self, output: HostArray, x: HostArray) -> tuple[object, ...]:
        return flat_of(output), self._parts(x), self.op

    def transposed(self) -> InJit:
        return UnevenAllGather(self.group, self.sizes)
