"""Prefixes: for each rank, the reduction of the contributions of the ranks up to it.

The prefix of ``count`` ranks has the same bits as a reduction in a group of only these ranks (see
``transport._operands.order``). Its tree has a block for each 1 in the binary digits of ``count``,
widest first. The two narrowest blocks are combined first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transport._operands.reduce_op import Flat, RedOpType, ReduceOp

_Numbers = npt.NDArray[np.intp]


class Level(NamedTuple):
    """The use of blocks of one width in the prefixes.

    The prefixes ``first`` start as the blocks ``to_first``. The blocks ``to_later`` are combined,
    as lower operands, with the prefixes ``later``.
    """

    first: _Numbers
    to_first: _Numbers
    later: _Numbers
    to_later: _Numbers


@lru_cache(maxsize=64)
def levels(size: int) -> tuple[Level, ...]:
    """Return the use of blocks of 1, 2, 4, … ranks in the prefixes of 1 to ``size`` ranks."""
    counts = np.arange(1, size + 1)
    found: list[Level] = []
    for level in range(size.bit_length()):
        here = counts[counts >> level & 1 == 1]
        is_first = here & (1 << level) - 1 == 0
        first, later = here[is_first], here[~is_first]
        found.append(Level(first - 1, (first >> level) - 1, later - 1, (later >> level) - 1))
    return tuple(found)


def prefixes(op: ReduceOp, rows: Flat) -> Flat:
    """Return the prefixes of ``rows``, one contribution for each rank, in the reduction dtype."""
    found = np.empty_like(rows)
    blocks = rows
    for level in levels(len(rows)):
        found[level.first] = blocks[level.to_first]
        lower = blocks[level.to_later]
        op.combine(lower, found[level.later], lower)
        found[level.later] = lower
        pairs = len(blocks) // 2 * 2
        lower = blocks[0:pairs:2].copy()
        op.combine(lower, blocks[1:pairs:2], lower)
        blocks = lower
    return found


def neutral(op: ReduceOp, dtype: np.dtype[np.generic]) -> Any:
    """Return the neutral element of ``op`` in ``dtype``, the reduction of no contributions."""
    if op.kind is RedOpType.PRODUCT:
        return 1
    if op.kind is RedOpType.BAND:
        return np.invert(np.zeros(1, dtype.name))[0]
    if op.kind not in (RedOpType.MIN, RedOpType.MAX):
        return 0
    is_min = op.kind is RedOpType.MIN
    if dtype.kind == "b":
        return is_min
    if dtype.kind in "iu":
        limits = np.iinfo(dtype.name)
    elif np.isnan(np.array(np.inf).astype(dtype)):  # Some 8-bit floats have no infinity.
        import ml_dtypes

        limits = ml_dtypes.finfo(dtype)
    else:
        return np.inf if is_min else -np.inf
    return limits.max if is_min else limits.min
