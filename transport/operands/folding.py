"""Reducing several ranks' parts into one, where all lie in memory: in rank order, small floats in
float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.operands.copying import copy
from transport.operands.flat import Scratch
from transport.operands.operand import scale, store
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype

_TOTAL, _WIDENED, _LOADED = 0, 1, 2


class Folding:
    """Stages inputs for a reduction over ``size`` ranks, and folds the staged parts.

    ``piece`` (bytes) is how much is worked on at a time where there are intermediate results, so
    that they stay in a core's cache.
    """

    def __init__(self, size: int, piece: int) -> None:
        self._size = size
        self._piece = piece
        self._scratch = Scratch()

    @staticmethod
    def staged_dtype(dtype: np.dtype[np.generic], op: ReduceOp) -> np.dtype[np.generic]:
        """Return the dtype in which inputs of ``dtype`` are staged.

        Their own; a scaled small float is no longer one, and travels as it will be added.
        """
        return reduction_dtype(dtype) if op.kind is RedOpType.PREMUL_SUM else dtype

    @staticmethod
    def stage(into: Flat, source: Flat, start: int, stop: int, op: ReduceOp) -> None:
        """Write elements ``start`` to ``stop`` of ``source``, ready to be folded, to ``into``."""
        if op.factor is None:
            copy(into, source[start:stop])
        else:
            scale(into, source, start, stop, op)

    @staticmethod
    def unstage(into: Flat, result: Flat) -> None:
        """Write ``result``, of the dtype of what is staged, to as many elements ``into``."""
        if into.dtype == result.dtype:
            copy(into, result)
        else:
            store(into, result)

    def load(self, source: Flat, start: int, stop: int, op: ReduceOp) -> Flat:
        """Return elements ``start`` to ``stop`` of ``source`` as they would be staged.

        Valid until the next ``load``.
        """
        if op.factor is None:
            return source[start:stop]
        loaded = self._scratch.flat(_LOADED, self.staged_dtype(source.dtype, op), stop - start)
        self.stage(loaded, source, start, stop, op)
        return loaded

    def fold(self, parts: Sequence[Flat], op: ReduceOp, out: Flat) -> None:
        """Reduce ``parts``, staged by the ranks in order, into ``out``, which may be one of them.

        ``out`` is of the dtype of the inputs, or of that of the parts.
        """
        work = reduction_dtype(out.dtype)
        if parts[0].dtype == work == out.dtype and all(part is not out for part in parts[2:]):
            op.combine(parts[0], parts[1], out)
            for part in parts[2:]:
                op.combine(out, part, out)
            op.finish(out, self._size)
            return
        step = max(1, self._piece // work.itemsize)
        for start in range(0, out.size, step):
            stop = min(start + step, out.size)
            self._fold_piece([part[start:stop] for part in parts], op, out[start:stop], work)

    def _fold_piece(
        self, parts: Sequence[Flat], op: ReduceOp, out: Flat, work: np.dtype[np.generic]
    ) -> None:
        total = self._scratch.flat(_TOTAL, work, out.size)
        total[:] = parts[0]
        for part in parts[1:]:
            if part.dtype != work:
                widened = self._scratch.flat(_WIDENED, work, out.size)
                widened[:] = part
                op.combine(total, widened, total)
            else:
                op.combine(total, part, total)
        op.finish(total, self._size)
        out[:] = total
