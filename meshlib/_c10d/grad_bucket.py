"""``GradBucket``: the argument of communication hooks in data-parallel training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class GradBucket(ABC):
    """A bucket with complete gradients, created by ``parallel``. Methods as in c10d."""

    @abstractmethod
    def index(self) -> int:
        """Return the bucket's number; every rank reduces the buckets in this order."""

    @abstractmethod
    def is_last(self) -> bool:
        """True if this is the last bucket of the backward pass."""

    @abstractmethod
    def buffer(self) -> Any:
        """Return the flat buffer, shape (sum of the parameters' sizes,)."""

    @abstractmethod
    def gradients(self) -> Sequence[Any]:
        """Return the gradients: views of the buffer in the parameters' shapes."""

    @abstractmethod
    def parameters(self) -> Sequence[Any]:
        """Return the parameters, in the buffer's order."""

    @abstractmethod
    def set_buffer(self, buffer: Any) -> None:
        """Replace the buffer with ``buffer``, of the same shape."""
