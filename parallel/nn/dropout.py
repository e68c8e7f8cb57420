"""Dropout."""

from __future__ import annotations

import numpy as np

from parallel.arrays import Array, namespace
from parallel.nn.module import Module


class Dropout(Module):
    """In training, zero each element with probability ``p`` and scale the rest by 1/(1-p).

    Srivastava et al., "Dropout", JMLR 15 (2014), in its inverted form. ``rng`` draws the masks:
    give ranks that hold different data generators with different seeds, and ranks that hold the
    same activations (tensor parallel) equal ones.
    """

    def __init__(self, p: float = 0.5, *, rng: np.random.Generator) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p must lie in [0, 1), got {p}")
        self.p = p
        self.rng = rng

    def forward(self, x: Array) -> Array:
        """Return x with elements dropped (in evaluation mode: x itself)."""
        if not self.training:
            return x
        keep = self.rng.random(x.shape) >= self.p
        mask = namespace(x).asarray(keep / (1 - self.p), dtype=x.dtype)
        self.save_for_backward(mask)
        return x * mask

    def backward(self, grad: Array) -> Array:
        """Apply the same mask."""
        return grad * self.saved()
