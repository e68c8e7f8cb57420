"""What the reducer knows of gradients, and of the wrapper that owns them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from parallel._arrays import Array, Namespace, namespace, placement


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """A gradient before it comes: its name in the model, its shape and dtype, and where it lies."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: str = "cpu"
    library: Namespace = np
    parameter: Any = None
    """What ``GradBucket.parameters`` shows to a hook."""

    @classmethod
    def of(cls, name: str, data: Array, parameter: Any) -> GradientSpec:
        """Return the spec of the gradient of ``data``, the array of ``parameter``."""
        device = placement(data)[1]
        return cls(name, data.shape, data.dtype, device, namespace(data), parameter)

    @property
    def placement(self) -> tuple[str, str]:
        """(dtype name, device): only gradients with equal ones share a bucket."""
        return self.dtype.name, self.device

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.dtype.itemsize


class GradientOwner(Protocol):
    """The wrapper to which the gradients belong."""

    def accumulated(self, number: int) -> Array | None:
        """Return what earlier passes have accumulated for the gradient, None if nothing."""
        ...

    def rehome(self, views: Mapping[int, Array]) -> None:
        """Note that the gradients now have these places in buckets, by number."""
        ...

    def deliver(self, averages: Mapping[int, Array]) -> None:
        """Take a bucket's averages, by number; the arrays are parts of the bucket."""
        ...
