"""Flat buffers: their bytes, their division into parts, and reusable scratch memory."""

from __future__ import annotations

import numpy as np

from transport._operands.reduce_op import Flat

PAGE = 4096

_RAW = -1


def as_bytes(buffer: Flat) -> memoryview:
    """Return the bytes of ``buffer`` (format ``B``) without a copy.

    Goes through a uint8 array, because the buffer protocol supports neither bfloat16 nor float8.
    """
    view = buffer.view(np.uint8).data
    return view if view.ndim == 1 else view.cast("B")  # Some subclasses are never 1-D.


def address(buffer: Flat) -> int:
    """Return the address of ``buffer``, faster than ``buffer.ctypes.data``."""
    return buffer.__array_interface__["data"][0]


def copy(into: Flat, source: Flat) -> None:
    """Copy all elements in C order, for any shapes, unless both are the same memory."""
    if into.ndim > 1:
        into[...] = source.reshape(into.shape)
    elif into is not source and address(into) != address(source):
        into.reshape(source.shape)[...] = source


def part_bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return the start and stop of part ``index`` of ``count`` elements cut into ``parts``.

    The parts are in order, cover all elements, and differ in size by one element at most.
    """
    return count * index // parts, count * (index + 1) // parts


def segments_of(nbytes: int, segment: int) -> int:
    """Return the number of segments for ``nbytes``: at least one, even without data."""
    return max(1, -(-nbytes // segment))


class Scratch:
    """Working memory in a few growing slots, reused between calls.

    An algorithm requests at most two segments for each peer, so the memory stays bounded, and a
    repeated call allocates nothing. One thread at a time may use it.
    """

    __slots__ = ("_views",)

    def __init__(self) -> None:
        # By slot and dtype number; a slot's memory itself is under ``_RAW``.
        self._views: dict[tuple[int, int], Flat] = {}

    def flat(self, slot: int, dtype: np.dtype[np.generic], count: int) -> Flat:
        """Return ``count`` uninitialised elements of ``dtype`` in slot ``slot``.

        Different slots never overlap. A later request for the same slot reuses the memory.
        """
        key = (slot, dtype.num)
        view = self._views.get(key)
        if view is None or view.size < count:
            view = self._grow(slot, dtype, count)
            self._views[key] = view
        return view[:count]

    def _grow(self, slot: int, dtype: np.dtype[np.generic], count: int) -> Flat:
        raw = self._views.get((slot, _RAW))
        need = count * dtype.itemsize
        if raw is None or raw.nbytes < need:
            size = max(1, -(-need // PAGE)) * PAGE
            for key in [key for key in self._views if key[0] == slot]:
                del self._views[key]  # Views would keep the old memory alive.
            raw = np.empty(size, np.uint8)
            self._views[slot, _RAW] = raw
        usable = raw.nbytes - raw.nbytes % dtype.itemsize
        return raw[:usable].view(dtype)

    @property
    def nbytes(self) -> int:
        """The total size of all slots in bytes."""
        return sum(view.nbytes for (_, kind), view in self._views.items() if kind == _RAW)
