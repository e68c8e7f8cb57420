"""Layer normalisation, and by the root mean square alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parallel._arrays import Array, is_floating, namespace
from parallel._checks import check_nonnegative, to_count, to_floating
from parallel.nn._layers.linear import check_input
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter


class _Norm(Module):
    """What both have alike: a factor for each feature, and the division by the root mean square."""

    def __init__(
        self, features: int, eps: float = 1e-5, *, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__()
        features = to_count(features, "features")
        check_nonnegative(eps=eps)
        self.eps = eps
        self.weight: Parameter = Parameter(np.ones(features, to_floating(dtype, "dtype")))

    def check(self, x: Array) -> None:
        """Raise what ``forward`` does."""
        layer = type(self).__qualname__
        check_input(x, self.weight, self.weight.size, layer)
        if not is_floating(x.dtype):  # the mean of integers is float64
            raise TypeError(f"{layer} expects an input x of floats, got {x.dtype.name}")

    def normalised(self, x: Array) -> Array:
        """Return ``x`` divided by its root mean square, and save that for backward."""
        scale = 1 / namespace(x).sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        normal = x * scale
        self.save_for_backward((normal, scale))
        return normal


class LayerNorm(_Norm):
    """Normalise over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450, equations 3 and 4.

    Args:
        features: the size of the last dimension of input and output.
        eps: added to the (biased) variance.
        dtype: of weight (ones) and bias (zeros), each of shape (features,).

    Raises:
        ValueError: for no features, a negative eps, or a dtype that is not floating.
        TypeError: for arguments of another type.
    """

    def __init__(
        self, features: int, eps: float = 1e-5, *, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(features, eps, dtype=dtype)
        self.bias: Parameter = Parameter(np.zeros_like(self.weight.data))

    def forward(self, x: Array) -> Array:
        """Map (..., features) to the same shape.

        Raises ValueError for another last dimension, TypeError for what is no array, or one whose
        dtype would make the output another than the parameters'.
        """
        self.check(x)
        normal = self.normalised(x - x.mean(axis=-1, keepdims=True))
        return normal * self.weight.data + self.bias.data

    def backward(self, grad: Array) -> Array:
        """Map (..., features) to the same shape."""
        normal, scale = self.saved()
        self.defer(lambda: self._accumulate(normal, grad))
        # The Jacobian of the normalisation projects out the mean and the component along itself.
        inner = grad * self.weight.data
        mean = inner.mean(axis=-1, keepdims=True)
        along = (inner * normal).mean(axis=-1, keepdims=True)
        return scale * (inner - mean - normal * along)

    def _accumulate(self, normal: Array, grad: Array) -> None:
        leading = tuple(range(grad.ndim - 1))
        self.bias.accumulate_grad(grad.sum(axis=leading))
        self.weight.accumulate_grad((grad * normal).sum(axis=leading))


class RMSNorm(_Norm):
    """Divide by the root of the mean square over the last dimension, times ``weight``.

    ``x / sqrt(mean(x**2) + eps) * weight``: Zhang and Sennrich, "Root Mean Square Layer
    Normalization", arXiv:1910.07467, equation 4.

    Args:
        features: the size of the last dimension of input and output.
        eps: added to the mean square.
        dtype: of weight (ones), of shape (features,).

    Raises:
        ValueError: for no features, a negative eps, or a dtype that is not floating.
        TypeError: for arguments of another type.
    """

    def forward(self, x: Array) -> Array:
        """Map (..., features) to the same shape.

        Raises ValueError for another last dimension, TypeError for what is no array, or one whose
        dtype would make the output another than the parameters'.
        """
        self.check(x)
        return self.normalised(x) * self.weight.data

    def backward(self, grad: Array) -> Array:
        """Map (..., features) to the same shape."""
        normal, scale = self.saved()
        leading = tuple(range(grad.ndim - 1))
        self.defer(lambda: self.weight.accumulate_grad((grad * normal).sum(axis=leading)))
        inner = grad * self.weight.data
        along = (inner * normal).mean(axis=-1, keepdims=True)
        return scale * (inner - normal * along)
