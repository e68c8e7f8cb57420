"""What the engine leaves to NumPy of a reduction: whatever it has no loops for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.operands.operand import scale
from transport.operands.reduce_op import Flat, ReduceOp, reduction_dtype


def fold(parts: Sequence[Flat], op: ReduceOp, out: Flat) -> None:
    """Reduce ``parts``, those of ranks 0, 1, …, into ``out``, which may be one of them.

    All have one dtype. Small floats are reduced in float32 and rounded once. The order is a binary
    tree over the ranks that depends on their number alone. Ranks form blocks of 1, 2, 4, …; the
    value of a block is its lower half's, then its upper half's.
    """
    work = reduction_dtype(out.dtype)
    total = _merge(parts, op, work)  # new memory, as there are two ranks or more
    op.finish(total, len(parts))
    np.copyto(out, total, casting="unsafe")


def _merge(parts: Sequence[Flat], op: ReduceOp, work: np.dtype[np.generic]) -> Flat:
    """Return the value of a block of ranks: new memory, or one rank's part itself."""
    if len(parts) == 1:
        return parts[0].astype(work, copy=False)
    half = 1 << (len(parts) - 1).bit_length() - 1
    lower, upper = _merge(parts[:half], op, work), _merge(parts[half:], op, work)
    into = next((value for value in (lower, upper) if value.base is None), None)
    if into is None:
        into = np.empty_like(lower)
    op.combine(lower, upper, into)
    return into


def scaled(source: Flat, op: ReduceOp) -> Flat:
    """Return what PREMUL_SUM adds of ``source``: scaled, in the dtype of the reduction."""
    result = np.empty(source.size, reduction_dtype(source.dtype))
    scale(result, source, 0, source.size, op)
    return result
