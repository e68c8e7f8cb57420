"""Layers that work element by element. Input and output have the same shape and dtype.

``forward`` raises TypeError for what is no array.
"""

from __future__ import annotations

import math

import numpy as np

from parallel._arrays import Array, namespace
from parallel._checks import check_share, to_generator
from parallel.nn._module import Module


class ReLU(Module):
    """``max(x, 0)``; the derivative at 0 is 0."""

    def forward(self, x: Array) -> Array:
        """Return max(x, 0)."""
        y = namespace(x, "x").maximum(x, 0)
        self.save_for_backward(y)
        return y

    def backward(self, grad: Array) -> Array:
        """Let the gradient pass where the output is positive."""
        return grad * (self.saved() > 0)


class Tanh(Module):
    """``tanh(x)``, element by element; the derivative is ``1 - tanh(x)**2``."""

    def forward(self, x: Array) -> Array:
        """Return ``tanh(x)``: floating, of any shape."""
        y = namespace(x, "x").tanh(x)
        self.save_for_backward(y)
        return y

    def backward(self, grad: Array) -> Array:
        """Multiply by 1 - tanh(x)^2."""
        y = self.saved()
        return grad * (1 - y * y)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``, computed as ``(1 + tanh(x / 2)) / 2``, which cannot overflow."""

    def forward(self, x: Array) -> Array:
        """Return the logistic function of x."""
        y = (namespace(x, "x").tanh(x * 0.5) + 1) * 0.5
        self.save_for_backward(y)
        return y

    def backward(self, grad: Array) -> Array:
        """Multiply by y * (1 - y)."""
        y = self.saved()
        return grad * (y * (1 - y))


class GELU(Module):
    """The Gaussian error linear unit, in its tanh form.

    ``x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))``: Hendrycks and Gimpel, "Gaussian Error
    Linear Units", arXiv:1606.08415, section 2. It differs from the exact one by less than 0.0005
    and needs no error function, which NumPy lacks.
    """

    _SCALE = math.sqrt(2 / math.pi)
    _CUBIC = 0.044715

    def forward(self, x: Array) -> Array:
        """Return the activation of x."""
        t = namespace(x, "x").tanh(self._SCALE * x * (1 + self._CUBIC * x * x))
        self.save_for_backward((x, t))
        return 0.5 * x * (1 + t)

    def backward(self, grad: Array) -> Array:
        """Multiply by the derivative of the tanh form."""
        x, t = self.saved()
        inner = self._SCALE * (1 + 3 * self._CUBIC * x * x)
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


class Dropout(Module):
    """In training, zero each element with probability ``p`` and scale the rest by 1/(1-p).

    Srivastava et al., "Dropout", JMLR 15 (2014), in its inverted form. ``rng`` draws the masks;
    None: a generator that NumPy's global random state seeds, which ``np.random.seed`` sets. Give
    ranks that hold different data generators with different seeds, and ranks that hold the same
    activations (tensor parallel) equal ones.

    Raises ValueError for a ``p`` outside [0, 1), TypeError for one that is no number, and for an
    ``rng`` that is no generator.
    """

    def __init__(self, p: float = 0.5, *, rng: np.random.Generator | None = None) -> None:
        super().__init__()
        check_share(p, "p", whole=False)
        self.p = p
        self.rng: np.random.Generator = to_generator(rng)

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
