"""Random numbers by position: element i of a global array is the same on every rank.

The generator is counter-based (Philox 4x64, Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", 2011). Element i, in C order of the global array, uses draw i (uniform) or draws 2i and 2i +
1 (normal, by the Box-Muller transform). A rank draws the numbers of its part. If the part consists
of short pieces, the rank also draws the numbers between the pieces and drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib.sharding._local import Box, shape_of

_AT_ONCE = 1 << 16
_PER_COUNT = 4  # draws that Philox makes from one counter

Draws = npt.NDArray[np.uint64]


def draw_part(
    shape: Sequence[int], box: Box, seed: int, dtype: np.dtype[Any], distribution: str
) -> npt.NDArray[Any]:
    """Return the part ``box`` of the global array of ``shape``."""
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    each, convert = (2, _normal) if distribution == "normal" else (1, _uniform)

    def draw(start: int, count: int) -> npt.NDArray[Any]:
        first, skipped = divmod(start * each, _PER_COUNT)
        generator = np.random.Philox(key=key, counter=first)
        raw: Draws = generator.random_raw(skipped + count * each)[skipped:]
        return convert(raw, dtype)

    result = np.empty(shape_of(box), dtype)
    if result.size:
        _fill(result, shape, box, 0, draw)
    return result


def _fill(
    into: npt.NDArray[Any],
    shape: Sequence[int],
    box: Box,
    start: int,
    draw: Callable[[int, int], npt.NDArray[Any]],
) -> None:
    """Fill ``into``, the part ``box`` of an array of ``shape`` whose first element is ``start``."""
    if not shape:
        into[...] = draw(start, 1)[0]
        return
    inner, rows = prod(shape[1:]), box[0]
    start += rows.start * inner
    span = (rows.stop - rows.start) * inner
    if into.size == span:
        flat = into.reshape(-1)
        for at in range(0, span, _AT_ONCE):
            count = min(_AT_ONCE, span - at)
            flat[at : at + count] = draw(start + at, count)
    elif span <= _AT_ONCE:
        drawn = draw(start, span).reshape(len(into), *shape[1:])
        into[...] = drawn[(slice(None), *box[1:])]
    else:
        for i, row in enumerate(into):
            _fill(row, shape[1:], box[1:], start + i * inner, draw)


def _uniform(raw: Draws, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return numbers in [0, 1), on the finest evenly spaced grid that ``dtype`` has there."""
    bits = np.finfo(dtype).nmant + 1
    return (raw >> np.uint64(64 - bits)).astype(dtype) * dtype.type(2.0**-bits)


def _normal(raw: Draws, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    uniform = _uniform(raw, np.dtype(np.float64))
    radius = np.sqrt(-2.0 * np.log1p(-uniform[::2]))
    return (radius * np.cos(2 * pi * uniform[1::2])).astype(dtype)
