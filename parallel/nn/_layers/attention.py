"""Attention: rotary positions, queries over keys and values, and the layer with projections."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parallel._arrays import Array, is_floating, namespace
from parallel._checks import check_number, to_count, to_generator
from parallel._core.attention.dot_product import attend, attend_backward, component_along
from parallel.nn._layers.linear import Linear, check_last
from parallel.nn._module import Module


class RotaryEmbedding(Module):
    """Turn pairs of features by angles that are proportional to the position.

    The product of two vectors that were turned depends on the distance of their positions alone:
    Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2. Feature i and feature i + head_dim / 2
    are a pair, turned by ``position * base**(-2 i / head_dim)``. There is nothing to learn.

    Args:
        head_dim: The size of the last dimension, even.
        base: The larger it is, the slower the last pairs turn.

    Raises:
        ValueError: For a head_dim that is odd or below 2, or a base that is not above 0.
        TypeError: For arguments of another type.
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_dim: int = to_count(head_dim, "head_dim", 2)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even: features turn in pairs; got {head_dim}")
        check_number(base, "base")
        if not base > 0:
            raise ValueError(f"base must be above 0, got {base}")
        self.base: float = float(base)

    def forward(self, x: Array, positions: Array | None = None) -> Array:
        """Map (batch, length, heads, head_dim) to the same shape.

        ``positions`` are the places in the sequence, (length,); None: 0, 1 and so on.

        Raises ValueError for other shapes, TypeError for a value that is not an array.
        """
        xp = namespace(x, "x")
        if x.ndim != 4 or x.shape[-1] != self.head_dim:
            raise ValueError(
                "RotaryEmbedding expects an input of shape (batch, length, heads, "
                f"{self.head_dim}), got {list(x.shape)}"
            )
        if positions is None:
            positions = xp.arange(x.shape[1])
        elif tuple(getattr(positions, "shape", ())) != (x.shape[1],):
            shape = list(getattr(positions, "shape", ()))
            raise ValueError(f"positions must be an array of shape [{x.shape[1]}], got {shape}")
        positions = xp.asarray(positions)
        self.save_for_backward(positions)
        return self._turned(x, positions, 1)

    def backward(self, grad: Array) -> Array:
        return self._turned(grad, self.saved(), -1)

    def _turned(self, x: Array, positions: Array, direction: int) -> Array:
        xp = namespace(x)
        speeds = self.base ** (xp.arange(0, self.head_dim, 2) / -self.head_dim)
        angles = (positions[:, None] * (direction * speeds))[:, None, :]
        cos, sin = (function(angles).astype(x.dtype) for function in (xp.cos, xp.sin))
        first, second = x[..., : self.head_dim // 2], x[..., self.head_dim // 2 :]
        parts = [first * cos - second * sin, second * cos + first * sin]
        return xp.concatenate(parts, axis=-1)


class DotProductAttention(Module):
    """``softmax(q @ k.T / sqrt(head_dim)) @ v`` for each head.

    Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.2.1. With fewer heads
    of keys than of queries, each of them serves as many neighbouring heads of queries (Ainslie et
    al., "GQA", arXiv:2305.13245). The softmax is not kept for backward, but computed again.

    ``causal``: query i attends to the keys up to i, and to no later one.
    """

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal: bool = bool(causal)

    def positions(self, length: int) -> npt.NDArray[np.int64]:
        """Return which places of the sequence the ``length`` entries here are: all of them."""
        return np.arange(length)

    def check(self, q: Array, k: Array, v: Array) -> None:
        """Raise ValueError for shapes that do not fit together, TypeError for a value that is not
        an array."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            namespace(x, name)
            if not is_floating(x.dtype):
                raise TypeError(f"{name} must hold floats, got {x.dtype.name}")
            if x.ndim != 4:
                raise ValueError(
                    f"{name} must be (batch, length, heads, head_dim), got {list(x.shape)}"
                )
        if k.shape != v.shape:
            raise ValueError(f"v must have the shape of k, {list(k.shape)}, got {list(v.shape)}")
        batch, length, kv_heads, head_dim = k.shape
        if not length or q.shape[:2] != (batch, length) or q.shape[3] != head_dim:
            raise ValueError(
                f"q must be ({batch}, {length}, heads, {head_dim}), as k, with a length of at "
                f"least 1; got {list(q.shape)}"
            )
        if not kv_heads or q.shape[2] % kv_heads:
            raise ValueError(
                f"q has {q.shape[2]} heads, which do not divide by the {kv_heads} of k"
            )

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        """Map q, (batch, length, heads, head_dim), to the same shape.

        k and v are (batch, length, kv_heads, head_dim); heads divides by kv_heads.

        Raises ValueError for other shapes, TypeError for a value that is not an array.
        """
        self.check(q, k, v)
        return self.attend(q, k, v)

    def attend(self, q: Array, k: Array, v: Array) -> Array:
        """Return ``forward`` of arguments that were checked."""
        out, logs = self.compute(q, k, v)
        self.save_for_backward((q, k, v, out, logs))
        return out.astype(q.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Array, Array, Array]:
        q, k, v, out, logs = self.saved()
        q_grad, k_grad, v_grad = self.derivative(q, k, v, out, logs, grad)
        return (
            q_grad.astype(q.dtype, copy=False),
            k_grad.astype(k.dtype, copy=False),
            v_grad.astype(v.dtype, copy=False),
        )

    def compute(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Return the result, float32 or wider, and the softmax's logarithms."""
        return attend(namespace(q), q, k, v, causal=self.causal)

    def derivative(
        self, q: Array, k: Array, v: Array, out: Array, logs: Array, grad: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v; ``out`` and ``logs`` are those of ``compute``."""
        along = component_along(out, grad, k.shape[2])
        return attend_backward(namespace(q), q, k, v, grad, along, logs, causal=self.causal)


class MultiHeadAttention(Module):
    """Self-attention of several heads, (batch, length, features) to the same shape.

    The children ``query``, ``key``, ``value`` and ``output`` are ``Linear``; ``core`` is a
    ``DotProductAttention``. A head's features are adjacent. To split the heads over ranks, split
    the outputs of the first three and the inputs of ``output``. To split the sequence, replace
    ``core`` (``parallel.context``).

    Args:
        features: The size of the last dimension of input and output.
        heads: The number of heads; must divide ``features``.
        kv_heads: The number of heads of keys and values; must divide ``heads``. None: ``heads``.
        causal: Each place attends only to itself and those before it (True), or to all (False).
        rotary_base: The base of the rotary embedding of queries and keys; None for no embedding.
        bias: Give the projections a bias.
        rng: Draws the values of the projections. None: from NumPy's global random state, which
            ``np.random.seed`` sets. Ranks on which the layer must begin alike (``fully_shard``,
            ``parallelize``) need equal generators or seeds.
        dtype: Of the parameters, and so of the input.

    Raises:
        ValueError: For numbers that do not divide, or sizes below 1, a dtype that is not floating,
            and what ``RotaryEmbedding`` refuses.
        TypeError: For arguments of another type.
    """

    rotary: RotaryEmbedding | None

    def __init__(
        self,
        features: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = True,
        rotary_base: float | None = 10000.0,
        bias: bool = False,
        rng: np.random.Generator | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        features, heads = to_count(features, "features"), to_count(heads, "heads")
        kv_heads = heads if kv_heads is None else to_count(kv_heads, "kv_heads")
        if features % heads:
            raise ValueError(f"features is {features}, which does not divide by {heads} heads")
        if heads % kv_heads:
            raise ValueError(f"heads is {heads}, which does not divide by {kv_heads} kv_heads")
        rng = to_generator(rng)
        self.heads: int = heads
        self.kv_heads: int = kv_heads
        self.head_dim: int = features // heads
        self.rotary = None if rotary_base is None else RotaryEmbedding(self.head_dim, rotary_base)
        kv_features = kv_heads * self.head_dim
        self.query: Linear = Linear(features, features, bias, rng=rng, dtype=dtype)
        self.key: Linear = Linear(features, kv_features, bias, rng=rng, dtype=dtype)
        self.value: Linear = Linear(features, kv_features, bias, rng=rng, dtype=dtype)
        self.core: DotProductAttention = DotProductAttention(causal)
        self.output: Linear = Linear(features, features, bias, rng=rng, dtype=dtype)

    def forward(self, x: Array) -> Array:
        """Map (batch, length, features) to the same shape.

        Raises ValueError for another shape, TypeError for a value that is not an array, or one
        whose dtype would make the output another than the parameters'.
        """
        check_last(x, self.query.in_features, type(self).__qualname__)
        if x.ndim != 3:
            raise ValueError(
                f"MultiHeadAttention expects an input of shape (batch, length, features), got "
                f"{list(x.shape)}"
            )
        q, k, v = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        if self.rotary is not None:
            positions = self.core.positions(q.shape[1])
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        y = self.core(q, k, v)
        return self.output(y.reshape(*y.shape[:2], -1))

    def backward(self, grad: Array) -> Array:
        grad = self.output.backward(grad)
        q, k, v = self.core.backward(self._heads(grad))
        if self.rotary is not None:
            k, q = self.rotary.backward(k), self.rotary.backward(q)
        x_grad = self.value.backward(self._flat(v))
        x_grad += self.key.backward(self._flat(k))
        x_grad += self.query.backward(self._flat(q))
        return x_grad

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def _flat(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1)
