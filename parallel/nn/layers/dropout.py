"""Dropout."""

from __future__ import annotations

import numpy as np

from parallel.arrays import Array, namespace
from parallel.checks import check_generator, check_share
from parallel.nn.module import Module


class Dropout(Module):
    """In training, zero each element with probability ``p`` and scale the rest by 1/(1-p).

    Srivastava et al., "Dropout", JMLR 15 (2014), in its inverted form. ``rng`` draws the masks:
    give ranks that hold different data generators with different seeds, and ranks that hold the
    same activations (tensor parallel) equal ones.

    Raises ValueError for a ``p`` outside [0, 1), TypeError for one that is no number, and for an
    ``rng`` that is no generator.
    """

    def __init__(self, p: float = 0.5, *, rng: np.random.Generator) -> None:
        super().__init__()
        check_share(p, "p", whole=False)
        check_generator(rng)
        self.p = p
        self.rng = rng

    def forward(self, x: Array) -> Array:
        """Return x with elements dropped (in evaluation mode: x itself).

        Raises TypeError for what is no array.
        """
        if not self.training:
            return x
        xp = namespace(x, "x")
        keep = self.rng.random(x.shape) >= self.p
        mask = xp.asarray(keep / (1 - self.p), dtype=x.dtype)
        self.save_for_backward(mask)
        return x * mask

    def backward(self, grad: Array) -> Array:
        """Apply the same mask."""
        return grad * self.saved()
