"""Prefixes: for each rank, the reduction of the contributions of the ranks up to it.

The prefix of ``count`` ranks has the bits that a group of these ranks alone would get: see
``transport._operands.order``. Its tree consists of one block for each one in the binary digits of
``count``, the widest block first; the narrowest two are combined first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transport._operands.reduce_op import Flat, RedOpType, ReduceOp

_Numbers = npt.NDArray[np.intp]


class Level(NamedTuple):
    """What the blocks of one width give to the prefixes.

    The prefixes ``first`` begin with the blocks ``to_first``. To the prefixes ``later``, the blocks
    ``to_later`` come in front.
    """

    first: _Numbers
    to_first: _Numbers
    later: _Numbers
    to_later: _Numbers


@lru_cache(maxsize=64)
def levels(size: int) -> tuple[Level, ...]:
    """Return the blocks of 1, 2, 4, … ranks that make up the prefixes of 1 to ``size`` ranks."""
    counts = np.arange(1, size + 1)
    found: list[Level] = []
    for level in range(size.bit_length()):
        here = counts[counts >> level & 1 == 1]
        is_first = here & (1 << level) - 1 == 0
        first, later = here[is_first], here[~is_first]
        found.append(Level(first - 1, (first >> level) - 1, later - 1, (later >> level) - 1))
    return tuple(found)


def prefixes(op: ReduceOp, rows: Flat) -> Flat:
    """Return the prefixes of ``rows``, one contribution for each rank, in the op's dtype."""
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
    """Return the element of ``dtype`` that changes no other one: what no contribution comes to."""
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
    elif np.isnan(np.array(np.inf).astype(dtype)):  # some floats of 8 bits have no infinity
        import ml_dtypes

        limits = ml_dtypes.finfo(dtype)
    else:
        return np.inf if is_min else -np.inf
    return limits.max if is_min else limits.min
