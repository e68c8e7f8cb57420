"""Copying long pieces of memory between private arrays and shared segments."""

from __future__ import annotations

import numpy as np

from transport._operands.reduce_op import Flat

LONG = 4 << 10
"""Bytes from which on ``copy`` is worth its call."""

_STREAMED = 1 << 20
PAGE_BITS = 4095
_CLOSE = 64


def copy(into: Flat, source: Flat) -> None:
    """Copy ``source`` into ``into``: of one dtype and size.

    AMD's Zen 3 and 4 copy a tenth as fast as they could where the target begins a few bytes further
    into a page than the source does, and the C library uses their string instruction (glibc bug
    30994). Segments begin with a page and large arrays of NumPy 16 bytes into one, so that is a
    usual case here. A ufunc's vector loop knows no such case. From a megabyte on the C library may
    write past the caches, which is worth finding out.
    """
    if source.nbytes < LONG:
        into[...] = source
    else:
        copy_raw(into.view(np.uint8), source.view(np.uint8))


def copy_raw(into: Flat, source: Flat) -> None:
    """Copy as ``copy`` does between arrays of uint8, where there are many bytes."""
    if source.size < _STREAMED or (address(into) - address(source)) & PAGE_BITS < _CLOSE:
        np.bitwise_or(source, source, out=into)
    else:
        np.copyto(into, source)


def address(buffer: Flat) -> int:
    """Return where ``buffer`` begins: as ``buffer.ctypes.data`` does, in less time."""
    return buffer.__array_interface__["data"][0]
