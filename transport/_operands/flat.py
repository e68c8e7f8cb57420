"""Flat buffers: their bytes, how they are cut into parts, and scratch memory that is reused."""

from __future__ import annotations

import numpy as np

from transport._operands.reduce_op import Flat

PAGE = 4096

_RAW = -1


def as_bytes(buffer: Flat) -> memoryview:
    """Return the bytes of ``buffer`` (format ``B``) without a copy.

    It goes via a uint8 array, because the buffer protocol knows neither bfloat16 nor float8.
    """
    view = buffer.view(np.uint8).data
    return view if view.ndim == 1 else view.cast("B")  # a subclass may never have one dimension


def address(buffer: Flat) -> int:
    """Return where ``buffer`` begins: as ``buffer.ctypes.data`` does, in less time."""
    return buffer.__array_interface__["data"][0]


def copy(into: Flat, source: Flat) -> None:
    """Copy all elements in C order, whatever the shapes, unless both are the same memory."""
    if into.ndim > 1:
        into[...] = source.reshape(into.shape)
    elif into is not source and address(into) != address(source):
        into.reshape(source.shape)[...] = source


def part_bounds(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return where part ``index`` of ``count`` elements begins and ends.

    The parts are in order, cover everything, and differ in size by one element at most.
    """
    return count * index // parts, count * (index + 1) // parts


def segments_of(nbytes: int, segment: int) -> int:
    """Return how many segments ``nbytes`` take, at least one: empty data takes part as well."""
    return max(1, -(-nbytes // segment))


class Scratch:
    """A few growing pieces of working memory, kept between calls.

    An algorithm asks for at most two segments for each peer, so the memory stays bounded, and a
    repeated call allocates nothing. One thread at a time.
    """

    __slots__ = ("_views",)

    def __init__(self) -> None:
        # By slot and dtype number; a slot's memory itself is under ``_RAW``.
        self._views: dict[tuple[int, int], Flat] = {}

    def flat(self, slot: int, dtype: np.dtype[np.generic], count: int) -> Flat:
        """Return ``count`` elements of ``dtype`` in piece ``slot``, with undefined contents.

        Pieces of different slots never overlap; a later request for one slot takes its memory.
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
                del self._views[key]  # views of the old memory would keep it alive
            raw = np.empty(size, np.uint8)
            self._views[slot, _RAW] = raw
        usable = raw.nbytes - raw.nbytes % dtype.itemsize
        return raw[:usable].view(dtype)

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return sum(view.nbytes for (_, kind), view in self._views.items() if kind == _RAW)
