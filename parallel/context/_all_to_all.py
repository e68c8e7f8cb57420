"""Attention over a sequence that is split over ranks: each gets whole sequences of some heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup
from parallel._arrays import Array, namespace
from parallel._core.attention.places import positions_of
from parallel._groups import Ranks, resolve
from parallel.nn._layers.attention import DotProductAttention


class UlyssesAttention(DotProductAttention):
    """``DotProductAttention`` over the ranks of ``mesh``, each with a part of the sequence.

    An all-to-all gives each rank the whole sequence of 1/n of the heads, another one takes the
    results back: Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. Rank r has the r-th of n
    equal parts of the sequence.

    Args:
        mesh: the ranks: ``mesh["cp"]``, a process group, or None for the default group. The heads
            here, of queries and of keys, must divide by their number.
        causal: query i attends to the keys up to i of the whole sequence, and to no later one.

    Raises:
        TypeError: for what is no set of ranks.
        ValueError: for ranks without this one.
    """

    def __init__(self, mesh: Ranks | None = None, causal: bool = True) -> None:
        super().__init__(causal)
        self.spread(resolve(mesh, "mesh"))

    def spread(self, group: ProcessGroup) -> None:
        """Compute over ``group`` from now on."""
        self.group: ProcessGroup = group

    def positions(self, length: int) -> npt.NDArray[np.int64]:
        """Return which places of the sequence the ``length`` entries here are."""
        return positions_of(length, self.group, zigzag=False)

    def check(self, q: Array, k: Array, v: Array) -> None:
        """Raise ValueError for shapes that do not fit together, TypeError for what is no array."""
        super().check(q, k, v)
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise TypeError(
                    f"{name} must have the dtype of q, {q.dtype.name}, got {x.dtype.name}"
                )
        check_heads(q.shape[2], k.shape[2], self.group)

    def forward(self, q: Array, k: Array, v: Array) -> Array:
        """Map q, this rank's places (batch, length, heads, head_dim), to the same shape.

        k and v are (batch, length, kv_heads, head_dim); heads divides by kv_heads, both divide by
        the number of ranks. All ranks have equally many places.

        Raises ValueError for other shapes, TypeError for what is no array.
        """
        self.check(q, k, v)
        out = self.attend(*self._to_heads([q, k, v]))
        return self._to_places([out])[0]

    def backward(self, grad: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v, of this rank's places."""
        grads = super().backward(*self._to_heads([grad]))
        q_grad, k_grad, v_grad = self._to_places(grads)
        return q_grad, k_grad, v_grad

    def _to_heads(self, arrays: Sequence[Array]) -> list[Array]:
        """Return (batch, length, heads, d) as (batch, n * length, heads / n, d): one all-to-all."""
        xp, size = namespace(arrays[0]), self.group.size()
        rows = [xp.moveaxis(x.reshape(*x.shape[:2], size, -1, x.shape[3]), 2, 0) for x in arrays]
        came = xp.moveaxis(self._exchanged(rows), 0, 1)
        return [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in _parts(came, rows)]

    def _to_places(self, arrays: Sequence[Array]) -> list[Array]:
        """Return (batch, n * length, heads / n, d) as (batch, length, heads, d): one all-to-all."""
        xp, size = namespace(arrays[0]), self.group.size()
        rows = [xp.moveaxis(x.reshape(x.shape[0], size, -1, *x.shape[2:]), 1, 0) for x in arrays]
        came = xp.moveaxis(self._exchanged(rows), 0, 2)
        return [x.reshape(*x.shape[:2], -1, x.shape[4]) for x in _parts(came, rows)]

    def _exchanged(self, rows: Sequence[Array]) -> Array:
        """Send row i of each of ``rows``, (n, batch, length, heads, d), to rank i, heads joined."""
        xp = namespace(rows[0])
        sent = xp.ascontiguousarray(xp.concatenate(rows, axis=3))
        if self.group.size() == 1:
            return sent
        return self.group.all_to_all_single(xp.empty_like(sent), sent)


def _parts(joined: Array, rows: Sequence[Array]) -> list[Array]:
    """Take ``joined`` apart again along the heads, its last dim but one, as ``rows`` have them."""
    ends = np.cumsum([x.shape[3] for x in rows]).tolist()
    return namespace(joined).split(joined, ends[:-1], axis=-2)


def check_heads(heads: int, kv_heads: int, group: ProcessGroup, where: str = " here") -> None:
    """Raise ValueError unless both numbers of heads divide by the ranks of ``group``."""
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count % group.size():
            raise ValueError(
                f"there are {count} {name}{where}, which do not divide by the {group.size()} ranks"
                f" of {group}: an all-to-all gives each rank whole heads; expected a multiple, or"
                " method='ring'"
            )
