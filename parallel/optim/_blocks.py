"""Large arrays in blocks that fit into a processor's cache.

A formula makes temporaries. Of whole arrays, each of them is written to memory and read again, in
pages that the kernel has to clear first; of blocks, the next operation finds it in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from parallel._arrays import Array

_ELEMENTS = 1 << 17


def in_blocks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield views of ``arrays`` block by block: together they are all of it.

    Element by element, what is computed of blocks has the same bits as of whole arrays. Arrays that
    are small, not of one shape, on another device, or not each in one piece of memory come as they
    are, at once.
    """
    shape, size = arrays[0].shape, arrays[0].size
    if size <= _ELEMENTS or not all(_is_flat(each) and each.shape == shape for each in arrays):
        yield arrays
        return
    flat = [array.reshape(-1) for array in arrays]
    for begin in range(0, size, _ELEMENTS):
        yield tuple(array[begin : begin + _ELEMENTS] for array in flat)


def _is_flat(array: Array) -> bool:
    return isinstance(array, np.ndarray) and array.flags.c_contiguous
