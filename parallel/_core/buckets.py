"""Buckets: the flat buffers in which gradients are reduced together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from parallel._arrays import Array, Namespace, pieces
from parallel._core.gradients import GradientSpec


class Bucket:
    """A flat buffer that holds some gradients, one after the other.

    The gradients have ``numbers`` in the reducer; their ``views`` are the parts of ``buffer`` in
    their shapes, by number. This backward pass has yet to complete ``pending`` of them. Error
    feedback keeps in ``residual`` what reductions have rounded away.

    With a ``group`` the buffer is in its symmetric memory: all members make equal buckets then. A
    ``borrowed`` bucket has one gradient, and that gradient's own memory is the buffer until
    ``release``.
    """

    def __init__(
        self,
        index: int,
        numbers: Sequence[int],
        specs: Sequence[GradientSpec],
        group: ProcessGroup | None = None,
        *,
        borrowed: bool = False,
    ) -> None:
        first = specs[0]
        self.index = index
        self.numbers: list[int] = list(numbers)
        self.specs: list[GradientSpec] = list(specs)
        self.size: int = sum(spec.size for spec in specs)
        self.buffer: Array = None
        self.views: dict[int, Array] = {}
        self.borrowed = borrowed
        self.pending: int = len(self.numbers)
        self.residual: npt.NDArray[np.float32] | None = None
        self._before: dict[int, Array] = {}
        if not borrowed:
            self.buffer = allocate(self.size, first.dtype, first.library, group)
            # So that a gradient that never comes is zero; later passes fill what is missing.
            self.buffer.fill(0)
            self.views = self._by_number(self.buffer)

    def put(self, number: int, grad: Array | None) -> None:
        """Take the gradient ``number``, None for zeros. A borrowed bucket reduces it in place."""
        if not self.borrowed:
            put(self.views[number], grad)
            return
        (spec,) = self.specs
        home = spec.library.zeros(spec.shape, spec.dtype) if grad is None else grad
        self.buffer, self.views = home.reshape(-1), {number: home}

    def release(self) -> None:
        """Drop the memory that was borrowed."""
        if self.borrowed:
            self.buffer, self.views = None, {}

    def keep_residual(self, known: Mapping[int, Array]) -> None:
        """Keep what reductions round away.

        ``known`` has the parts that there are already, by the gradients' numbers.
        """
        self.residual = np.zeros(self.size, np.float32)
        for number, part in self.residuals().items():
            if number in known:
                part[...] = known[number]

    def residuals(self) -> dict[int, Array]:
        """Return the parts of ``residual`` by the gradients' numbers."""
        return {} if self.residual is None else self._by_number(self.residual)

    def remember(self, unused: Collection[int]) -> None:
        """Note what is kept for the ``unused`` gradients, before a reduction takes it along."""
        self._before = {n: part.copy() for n, part in self.residuals().items() if n in unused}

    def take_back(self, absent: Collection[int]) -> None:
        """Keep again what was kept before the reduction for ``absent``, whose averages are dropped.

        All have been ``unused``.
        """
        for number, part in self.residuals().items():
            if number in absent:
                part[...] = self._before[number]
        self._before = {}

    def split(self, buffer: Array) -> list[Array]:
        """Return the parts of ``buffer`` (flat, this bucket's size) in the gradients' shapes."""
        return pieces(buffer, (spec.shape for spec in self.specs))

    def _by_number(self, buffer: Array) -> dict[int, Array]:
        return dict(zip(self.numbers, self.split(buffer), strict=True))


def put(view: Array, grad: Array | None) -> None:
    """Copy a gradient into its place in a buffer, unless it is there; zeros where there is none."""
    if grad is None:
        view.fill(0)
    elif grad is not view:
        view[...] = grad


def allocate(size: int, dtype: Any, library: Namespace, group: ProcessGroup | None) -> Array:
    """Return a flat array of ``size`` elements of ``dtype``, made by ``library``.

    In the symmetric memory of ``group``, if there is one and it has such memory for the library.
    """
    if group is None or library is not np or "cpu" not in group.backends or group.size() == 1:
        return library.empty(size, dtype=dtype)
    return group.empty(size, dtype)
