"""Rotary position embedding."""

from __future__ import annotations

from parallel._arrays import Array, namespace
from parallel._checks import check_number, to_count
from parallel.nn._module import Module


class RotaryEmbedding(Module):
    """Turn pairs of features by angles that are proportional to the position.

    The product of two vectors that were turned depends on the distance of their positions alone:
    Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2. Feature i and feature i + head_dim / 2
    are a pair, turned by ``position * base**(-2 i / head_dim)``. There is nothing to learn.

    Args:
        head_dim: the size of the last dimension, even.
        base: the larger it is, the slower the last pairs turn.

    Raises:
        ValueError: for a head_dim that is odd or below 2, or a base that is not above 0.
        TypeError: for arguments of another type.
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

        Raises ValueError for other shapes, TypeError for what is no array.
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
        """Turn the gradient back."""
        return self._turned(grad, self.saved(), -1)

    def _turned(self, x: Array, positions: Array, direction: int) -> Array:
        xp = namespace(x)
        speeds = self.base ** (xp.arange(0, self.head_dim, 2) / -self.head_dim)
        angles = (positions[:, None] * (direction * speeds))[:, None, :]
        cos, sin = (function(angles).astype(x.dtype) for function in (xp.cos, xp.sin))
        first, second = x[..., : self.head_dim // 2], x[..., self.head_dim // 2 :]
        parts = [first * cos - second * sin, second * cos + first * sin]
        return xp.concatenate(parts, axis=-1)
