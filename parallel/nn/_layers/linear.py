"""The affine layer and the embedding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel._arrays import Array, is_floating, namespace, written
from parallel._checks import check_array, describe, to_count, to_floating, to_generator
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter


def uniform_init(
    shape: tuple[int, ...], bound: float, rng: np.random.Generator, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Return an array drawn uniformly from [-bound, bound).

    Values are drawn in float64 and rounded, so they agree for all dtypes.
    """
    return rng.uniform(-bound, bound, shape).astype(dtype)


class Linear(Module):
    """``y = x @ weight.T + bias``.

    Args:
        in_features: The size of the last dimension of the input, (..., in_features).
        out_features: The size of the last dimension of the output.
        bias: Add a bias to the outputs.
        rng: The generator of the initial values: both weight, (out_features, in_features), and
            bias, (out_features,), are uniform within 1/sqrt(in_features). None: NumPy's global
            random state, which ``np.random.seed`` sets. Ranks that must have equal initial values
            (``fully_shard``, ``parallelize``) need equal generators or seeds.
        dtype: The dtype of the parameters, and so of the input.

    Raises:
        ValueError: For sizes below 1, or a dtype that is not floating.
        TypeError: For arguments of another type.
    """

    bias: Parameter | None
    input_grad: bool = True
    """True if backward returns the gradient of the input, which is half of its work. False saves
    this work for a model's first layer. A layer that is split over ranks always computes it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rng: np.random.Generator | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        in_features = to_count(in_features, "in_features")
        out_features = to_count(out_features, "out_features")
        rng = to_generator(rng)
        dtype = to_floating(dtype, "dtype")
        bound = 1 / math.sqrt(in_features)
        self.weight: Parameter = Parameter(
            uniform_init((out_features, in_features), bound, rng, dtype)
        )
        self.bias = Parameter(uniform_init((out_features,), bound, rng, dtype)) if bias else None

    @property
    def in_features(self) -> int:
        """The size of the last dimension of the input."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """The size of the last dimension of the output."""
        return self.weight.shape[0]

    def forward(self, x: Array) -> Array:
        """Map (..., in_features) to (..., out_features).

        Raises ValueError for another last dimension. Raises TypeError unless ``x`` is an array, or
        if its dtype would change the output's from that of the parameters.
        """
        check_input(x, self.weight, self.in_features, type(self).__qualname__)
        self.save_for_backward(x)
        return self.affine(x)

    def backward(self, grad: Array) -> Any:
        """Map (..., out_features) to (..., in_features), or to None without ``input_grad``.

        The parameters' gradients are first, so their reduction overlaps with the computation of the
        input's gradient.
        """
        x = self.saved()
        self.defer(lambda: self.accumulate(x, grad))
        return grad @ self.weight.data if self.input_grad else None

    def affine(self, x: Array) -> Array:
        """Return ``x @ weight.T + bias`` as a new array, without saving data for backward."""
        y = x @ self.weight.data.T
        if self.bias is not None:
            y += self.bias.data
        return y

    def accumulate(self, x: Array, grad: Array) -> None:
        """Add the parameters' gradients for the input ``x`` and the output's gradient."""
        flat = grad.reshape(-1, grad.shape[-1])
        if self.bias is not None:
            self.bias.accumulate_grad(flat.sum(axis=0))
        self.weight.accumulate_matmul(flat.T, x.reshape(-1, x.shape[-1]))


def check_input(x: Array, weight: Parameter, features: int, layer: str) -> None:
    """Raise the errors of ``check_last``, and TypeError for a dtype that ``weight`` does not take.

    Otherwise the gradient would have another dtype than the parameter. An error in backward would
    be too late, because other ranks wait for the gradient by then.
    """
    check_last(x, features, layer)
    if not weight.takes(x.dtype):
        own = weight.data.dtype.name
        other = f", or a layer made with dtype={x.dtype.name!r}" if is_floating(x.dtype) else ""
        raise TypeError(
            f"{layer} has parameters of {own}, got an input x of {written(x)};"
            f" expected {own}: x.astype({own!r}){other}"
        )


def check_last(x: Array, features: int, layer: str) -> None:
    """Raise TypeError unless ``x`` is an array, ValueError unless its last dim is ``features``."""
    shape = getattr(x, "shape", None)
    if not shape or shape[-1] != features:
        expected = f"{layer} expects an input of shape (..., {features}), got"
        if shape is None:
            raise TypeError(f"{expected} {describe(x)}")
        raise ValueError(f"{expected} {list(shape)}")


class Embedding(Module):
    """``weight[indices]``, where weight is (num_embeddings, embedding_dim), drawn from N(0, 1).

    ``rng`` is the generator of the weight, of dtype ``dtype``; None: NumPy's global random state,
    which ``np.random.seed`` sets. Ranks that must have equal initial values (``fully_shard``,
    ``parallelize``) need equal generators or seeds.

    Raises ValueError for sizes below 1 or a dtype that is not floating, TypeError for arguments of
    another type.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rng: np.random.Generator | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        rows = to_count(num_embeddings, "num_embeddings")
        columns = to_count(embedding_dim, "embedding_dim")
        table = to_generator(rng).standard_normal((rows, columns))
        self.weight: Parameter = Parameter(table.astype(to_floating(dtype, "dtype")))

    def forward(self, indices: Array) -> Array:
        """Map integers of any shape, each in [0, num_embeddings), to (*shape, embedding_dim).

        Raises IndexError for an index out of range, TypeError for other dtypes than integers.
        """
        self.check(indices)
        self.save_for_backward(indices)
        return self.weight.data[indices]

    def backward(self, grad: Array) -> None:
        """Add each vector's gradient to its row. Returns None, because indices have no gradient."""
        rows = self.saved().reshape(-1)
        self.defer(lambda: self.accumulate(rows, grad.reshape(-1, grad.shape[-1])))

    @property
    def num_embeddings(self) -> int:
        """The number of rows."""
        return self.weight.shape[0]

    def check(self, indices: Array) -> None:
        """Raise IndexError for an index out of range, TypeError for other dtypes than integers."""
        check_array(indices, "indices")
        if indices.dtype.kind not in "iu":
            raise TypeError(f"indices must be integers, got {indices.dtype.name}")
        count = self.num_embeddings
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= count):
            raise IndexError(
                f"indices must be in [0, {count}), got {int(indices.min())} to {int(indices.max())}"
            )

    def accumulate(self, rows: Array, grads: Array) -> None:
        """Add ``grads``, (n, embedding_dim), to the gradients of ``rows``, (n,)."""
        total = namespace(grads).zeros_like(self.weight.data)
        namespace(grads).add.at(total, rows, grads)
        self.weight.accumulate_grad(total)
