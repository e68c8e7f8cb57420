"""Containers, activations, dropout and normalisation.

Activations are element-wise: input and output have the same shape and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel._arrays import Array, is_floating, namespace
from parallel._checks import (
    check_instance,
    check_nonnegative,
    check_share,
    to_count,
    to_floating,
    to_generator,
)
from parallel.nn._layers.linear import check_input
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter


class Sequential(Module):
    """A sequence of modules, with the paths "0", "1" and so on.

    ``layers`` are the modules, in the order of forward. Raises TypeError for a layer that is not a
    ``Module``.
    """

    def __init__(self, *layers: Module) -> None:
        super().__init__()
        for i, layer in enumerate(layers):
            check_instance(layer, Module, f"layers[{i}]")
        self.layers = layers

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (position, module)."""
        return ((str(i), layer) for i, layer in enumerate(self.layers))

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Module:
        return self.layers[index]

    def forward(self, x: Any) -> Any:
        """Return the last module's output."""
        for layer in self.layers:
            x = layer(x)
        return x

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the first module's input."""
        for layer in reversed(self.layers):
            grad = layer.backward(grad)
        return grad


class Residual(Sequential):
    """A sequence of modules with a residual connection: ``x + layers(x)``.

    He et al., "Deep Residual Learning", arXiv:1512.03385, section 3.2. ``layers`` are the modules,
    in the order of forward; the output of the last one must have the shape of the input. Raises
    TypeError for a layer that is not a ``Module``.
    """

    def forward(self, x: Any) -> Any:
        """Return the input plus the last module's output."""
        return x + super().forward(x)

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the input, the sum over both paths."""
        return grad + super().backward(grad)


class ReLU(Module):
    """``max(x, 0)``; the derivative at 0 is 0."""

    def forward(self, x: Array) -> Array:
        """Return max(x, 0)."""
        y = namespace(x, "x").maximum(x, 0)
        self.save_for_backward(y)
        return y

    def backward(self, grad: Array) -> Array:
        return grad * (self.saved() > 0)


class Tanh(Module):
    """``tanh(x)``, element by element; the derivative is ``1 - tanh(x)**2``."""

    def forward(self, x: Array) -> Array:
        """Return ``tanh(x)`` for a floating ``x`` of any shape."""
        y = namespace(x, "x").tanh(x)
        self.save_for_backward(y)
        return y

    def backward(self, grad: Array) -> Array:
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
        y = self.saved()
        return grad * (y * (1 - y))


class GELU(Module):
    """The Gaussian error linear unit, in its tanh form.

    ``x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))``: Hendrycks and Gimpel, "Gaussian Error
    Linear Units", arXiv:1606.08415, section 2. It differs from the exact GELU by less than 0.0005,
    and does not need the error function, which NumPy lacks.
    """

    _SCALE = math.sqrt(2 / math.pi)
    _CUBIC = 0.044715

    def forward(self, x: Array) -> Array:
        """Return the activation of x."""
        t = namespace(x, "x").tanh(self._SCALE * x * (1 + self._CUBIC * x * x))
        self.save_for_backward((x, t))
        return 0.5 * x * (1 + t)

    def backward(self, grad: Array) -> Array:
        x, t = self.saved()
        inner = self._SCALE * (1 + 3 * self._CUBIC * x * x)
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


class Dropout(Module):
    """Dropout: in training, zeroes elements with probability ``p``, and scales others by 1/(1-p).

    Srivastava et al., "Dropout", JMLR 15 (2014), in the inverted form. ``rng`` is the generator of
    the masks; None: a new generator, seeded from NumPy's global random state, which
    ``np.random.seed`` sets. Ranks with different data need different seeds; ranks with the same
    activations (tensor parallel) need equal seeds.

    Raises ValueError for a ``p`` outside [0, 1), TypeError if ``p`` is not a number or ``rng`` is
    not a generator.
    """

    def __init__(self, p: float = 0.5, *, rng: np.random.Generator | None = None) -> None:
        super().__init__()
        check_share(p, "p", whole=False)
        self.p = p
        self.rng: np.random.Generator = to_generator(rng)

    def forward(self, x: Array) -> Array:
        """Return x with dropped elements; in evaluation mode, x itself.

        Raises TypeError for a value that is not an array.
        """
        if not self.training:
            return x
        xp = namespace(x, "x")
        keep = self.rng.random(x.shape) >= self.p
        mask = xp.asarray(keep / (1 - self.p), dtype=x.dtype)
        self.save_for_backward(mask)
        return x * mask

    def backward(self, grad: Array) -> Array:
        return grad * self.saved()


class _Norm(Module):
    """The base of both norms: division by the root mean square, and a factor per feature."""

    def __init__(
        self, features: int, eps: float = 1e-5, *, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__()
        features = to_count(features, "features")
        check_nonnegative(eps=eps)
        self.eps = eps
        self.weight: Parameter = Parameter(np.ones(features, to_floating(dtype, "dtype")))

    def check(self, x: Array) -> None:
        """Raise the errors of ``forward`` for ``x``."""
        layer = type(self).__qualname__
        check_input(x, self.weight, self.weight.size, layer)
        if not is_floating(x.dtype):  # the mean of integers is float64
            raise TypeError(f"{layer} expects an input x of floats, got {x.dtype.name}")

    def normalised(self, x: Array) -> Array:
        """Return ``x`` divided by its root mean square; save the result and the factor."""
        scale = 1 / namespace(x).sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        normal = x * scale
        self.save_for_backward((normal, scale))
        return normal


class LayerNorm(_Norm):
    """Normalise over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, equations 3 and 4.

    Args:
        features: The size of the last dimension of input and output.
        eps: Added to the (biased) variance.
        dtype: The dtype of weight (ones) and bias (zeros), each of shape (features,).

    Raises:
        ValueError: For features below 1, a negative eps, or a dtype that is not floating.
        TypeError: For arguments of another type.
    """

    def __init__(
        self, features: int, eps: float = 1e-5, *, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(features, eps, dtype=dtype)
        self.bias: Parameter = Parameter(np.zeros_like(self.weight.data))

    def forward(self, x: Array) -> Array:
        """Map (..., features) to the same shape.

        Raises ValueError for another last dimension. Raises TypeError if ``x`` is not an array, or
        if the output would not have the dtype of the parameters.
        """
        self.check(x)
        normal = self.normalised(x - x.mean(axis=-1, keepdims=True))
        return normal * self.weight.data + self.bias.data

    def backward(self, grad: Array) -> Array:
        normal, scale = self.saved()
        self.defer(lambda: self._accumulate(normal, grad))
        # The normalisation's Jacobian projects out the mean and the component along ``normal``.
        inner = grad * self.weight.data
        mean = inner.mean(axis=-1, keepdims=True)
        along = (inner * normal).mean(axis=-1, keepdims=True)
        return scale * (inner - mean - normal * along)

    def _accumulate(self, normal: Array, grad: Array) -> None:
        leading = tuple(range(grad.ndim - 1))
        self.bias.accumulate_grad(grad.sum(axis=leading))
        self.weight.accumulate_grad((grad * normal).sum(axis=leading))


class RMSNorm(_Norm):
    """Root mean square normalisation over the last dimension, with a factor ``weight``.

    ``x / sqrt(mean(x**2) + eps) * weight``: Zhang and Sennrich, "Root Mean Square Layer
    Normalization", arXiv:1910.07467, equation 4.

    Args:
        features: The size of the last dimension of input and output.
        eps: Added to the mean square.
        dtype: The dtype of weight (ones), of shape (features,).

    Raises:
        ValueError: For features below 1, a negative eps, or a dtype that is not floating.
        TypeError: For arguments of another type.
    """

    def forward(self, x: Array) -> Array:
        """Map (..., features) to the same shape.

        Raises ValueError for another last dimension. Raises TypeError if ``x`` is not an array, or
        if the output would not have the dtype of the parameters.
        """
        self.check(x)
        return self.normalised(x) * self.weight.data

    def backward(self, grad: Array) -> Array:
        normal, scale = self.saved()
        leading = tuple(range(grad.ndim - 1))
        self.defer(lambda: self.weight.accumulate_grad((grad * normal).sum(axis=leading)))
        inner = grad * self.weight.data
        along = (inner * normal).mean(axis=-1, keepdims=True)
        return scale * (inner - normal * along)
