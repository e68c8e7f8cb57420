"""The conversion of inputs to operands of a reduction, and of results to outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport._operands.flat import Scratch
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype

# Slots of the communicator's scratch memory.
ARRIVING = 0
LOADED = 2
TOTAL = 3
WHOLE = 4
CODED = 5
WIDENED = 6
ENCODED = 7
REDUCED = 9


class Operand:
    """Loads inputs of one dtype for ``op``: widened to the reduction dtype, and scaled.

    If neither is needed, ``load`` returns a view of the input.
    """

    __slots__ = ("_copies", "_op", "_scratch", "_slot", "dtype")

    def __init__(
        self, scratch: Scratch, op: ReduceOp, dtype: np.dtype[np.generic], slot: int = LOADED
    ) -> None:
        self.dtype = reduction_dtype(dtype)
        self._copies = self.dtype != dtype or op.kind is RedOpType.PREMUL_SUM
        self._op = op
        self._scratch = scratch
        self._slot = slot

    def load(self, source: Flat, start: int, stop: int) -> Flat:
        """Return elements ``start`` to ``stop`` of ``source``, valid until the next ``load``."""
        part = source[start:stop]
        if not self._copies:
            return part
        loaded = self._scratch.flat(self._slot, self.dtype, part.size)
        scale(loaded, source, start, stop, self._op)
        return loaded


def scale(into: Flat, source: Flat, start: int, stop: int, op: ReduceOp) -> None:
    """Write elements ``start`` to ``stop`` of ``source``, scaled if ``op`` scales, to ``into``."""
    np.copyto(into, source[start:stop], casting="unsafe")
    op.part(start, stop, source.size).prepare(into)


def store(into: Flat, value: Flat) -> None:
    """Write a reduced ``value`` to ``into``, rounded once if ``into`` is narrower."""
    np.copyto(into, value, casting="unsafe")


def pack(scratch: Scratch, op: ReduceOp, inputs: Sequence[Flat]) -> tuple[Flat, list[Flat]]:
    """Return a buffer with all ``inputs`` as operands of ``op``, one after the other, and each
    input's part of it. Uses the scratch slots ``TOTAL`` and ``LOADED``.
    """
    operand = Operand(scratch, op, inputs[0].dtype)
    total = scratch.flat(TOTAL, operand.dtype, sum(part.size for part in inputs))
    places: list[Flat] = []
    start = 0
    for part in inputs:
        place = total[start : start + part.size]
        np.copyto(place, operand.load(part, 0, part.size))
        places.append(place)
        start += part.size
    return total, places
