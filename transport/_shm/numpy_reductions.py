"""Reductions with NumPy, for dtypes and ops that the engine does not support."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport._operands import order
from transport._operands.flat import Scratch
from transport._operands.operand import scale
from transport._operands.reduce_op import Flat, ReduceOp, reduction_dtype


def reduce_parts(scratch: Scratch, parts: Sequence[Flat], op: ReduceOp, out: Flat) -> None:
    """Reduce the ``parts`` of ranks 0, 1, … into ``out``, which may be one of them.

    All have the same dtype and size. Small floats are reduced in float32 and rounded once.
    """
    total = np.empty(out.size, reduction_dtype(out.dtype))
    order.tree_reduce(scratch, op, parts, total)
    op.finish(total, len(parts))
    np.copyto(out, total, casting="unsafe")


def scaled(source: Flat, op: ReduceOp) -> Flat:
    """Return the operand of a PREMUL_SUM: ``source`` scaled, in the reduction's dtype."""
    result = np.empty(source.size, reduction_dtype(source.dtype))
    scale(result, source, 0, source.size, op)
    return result
