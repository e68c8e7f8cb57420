"""Arrays that do not lie in one piece, as a communicator may take them: read and written in parts.

They have two dims or more, and their elements count in C order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from transport._operands.reduce_op import Flat

Strided = npt.NDArray[Any]


def gather(into: Flat, source: Strided, start: int) -> None:
    """Copy as many elements as ``into`` has from ``source``, from number ``start`` on."""
    begin = 0
    for part in _parts(source, start, start + into.size):
        end = begin + part.size
        into[begin:end].reshape(part.shape)[...] = part
        begin = end


def scatter(into: Strided, start: int, source: Flat) -> None:
    """Copy ``source`` into ``into``, from number ``start`` on."""
    begin = 0
    for part in _parts(into, start, start + source.size):
        end = begin + part.size
        part[...] = source[begin:end].reshape(part.shape)
        begin = end


def copy_all(into: Strided, source: Strided) -> None:
    """Copy all elements, in their order; either may be flat, and their shapes may differ."""
    if into.ndim > 1:
        into[...] = source.reshape(into.shape)
    else:
        into.reshape(source.shape)[...] = source


def _parts(array: Strided, start: int, stop: int) -> Iterator[Strided]:
    """Yield views of the elements ``start`` to ``stop``, in order: few, whatever the shape."""
    if start >= stop:
        return
    if array.ndim == 1:
        yield array[start:stop]
        return
    row = array.size // array.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _parts(array[last], start - last * row, stop - last * row)
        return
    if start % row:
        yield from _parts(array[first - 1], start % row, row)
    if first < last:
        yield array[first:last]
    if stop % row:
        yield from _parts(array[last], 0, stop % row)
