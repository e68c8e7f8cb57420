"""``GradBucket``: the argument of communication hooks of data parallel training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class GradBucket(ABC):
    """One bucket whose gradients are all there; ``parallel`` makes them. Methods as in c10d."""

    @abstractmethod
    def index(self) -> int:
        """Return the bucket's number; buckets are sent off in this order on every rank."""

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
        """Replace the buffer that ``buffer()`` returns by ``buffer``, of the same shape."""
