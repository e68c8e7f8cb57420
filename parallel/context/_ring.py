"""Attention over a sequence that is split over ranks: keys and values go round a ring."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from parallel._arrays import Array, namespace
from parallel._core.attention.places import half_of, positions_of
from parallel._core.attention.ring import MessageCarrier, Ring
from parallel._groups import Ranks, resolve
from parallel.nn._layers.attention import DotProductAttention


class RingAttention(DotProductAttention):
    """``DotProductAttention`` over the ranks of ``mesh``, each with a part of the sequence.

    Keys and values go round the ranks, and round again, with their gradients, in backward. See
    ``parallel._core.attention.ring``.

    Args:
        mesh: the ranks: ``mesh["cp"]``, a process group, or None for the default group.
        causal: query i attends to the keys up to i of the whole sequence, and to no later one.
        zigzag: which places each rank has, see ``sequence_positions``: a zig-zag, or a row.

    Raises:
        TypeError: for what is no set of ranks.
        ValueError: for ranks without this one.
    """

    def __init__(
        self, mesh: Ranks | None = None, causal: bool = True, *, zigzag: bool = True
    ) -> None:
        super().__init__(causal)
        self.spread(resolve(mesh, "mesh"), zigzag)

    def spread(self, group: ProcessGroup, zigzag: bool) -> None:
        """Compute over ``group`` from now on, in the order that ``zigzag`` says."""
        self.group: ProcessGroup = group
        self.zigzag: bool = bool(zigzag)

    def positions(self, length: int) -> npt.NDArray[np.int64]:
        """Return which places of the sequence the ``length`` entries here are."""
        return positions_of(length, self.group, self.zigzag)

    def check(self, q: Array, k: Array, v: Array) -> None:
        """Raise ValueError for shapes that do not fit together, TypeError for what is no array."""
        super().check(q, k, v)
        if k.dtype != v.dtype:
            raise TypeError(f"v must have the dtype of k, {k.dtype.name}, got {v.dtype.name}")
        if self.zigzag:
            half_of(q.shape[1], self.group.size())

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        """Map q, this rank's places (batch, length, heads, head_dim), to the same shape.

        k and v are (batch, length, kv_heads, head_dim); heads divides by kv_heads. All ranks have
        equally many places.

        Raises ValueError for other shapes, and for an odd length and a zig-zag, TypeError for what
        is no array.
        """
        if self.group.size() == 1:
            return super().forward(q, k, v)
        self.check(q, k, v)
        ring = self._ring(q)
        out, logs = ring.forward(MessageCarrier(self.group, ring.xp), q, k, v)
        self.save_for_backward((q, k, v, out, logs))
        return out.astype(q.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v, of this rank's places."""
        if self.group.size() == 1:
            return super().backward(grad)
        q, k, v, out, logs = self.saved()
        ring = self._ring(q)
        grads = ring.backward(MessageCarrier(self.group, ring.xp), q, k, v, out, logs, grad)
        q_grad, k_grad, v_grad = (
            one.astype(x.dtype, copy=False) for one, x in zip(grads, (q, k, v), strict=True)
        )
        return q_grad, k_grad, v_grad

    def _ring(self, q: Array) -> Ring:
        group = self.group
        return Ring(namespace(q), group.rank(), group.size(), self.causal, self.zigzag)
