"""Attention over a sequence that is split over ranks: keys and values go round a ring."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup, Work
from parallel.arrays import Array, namespace
from parallel.core.attention.dot_product import attend, attend_backward, component_along, merge
from parallel.core.attention.places import half_of, positions_of
from parallel.groups import Ranks, resolve
from parallel.nn.layers.attention import DotProductAttention

_KEYS, _GRADIENTS = 0, 1  # tags: what one rank sends the next in a step
_BEGUN = 2  # and, added to these, that it has begun with the step


class Block(NamedTuple):
    """Which of the queries here see which of the keys that came, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


def block_of(rank: int, source: int, half: int, causal: bool, zigzag: bool) -> Block | None:
    """Return what ``rank`` computes with the keys of ``source``; None: it sees none of them.

    ``half`` is the length of a chunk of a zig-zag. Ranks have two of them: of the keys of one
    before this rank all queries see the early chunk, and none the late one; those of one after it
    are seen, all of them, by the late queries. So each step but the first is half of a block.
    """
    everything = slice(None)
    if not causal or rank == source:
        return Block(everything, everything, causal)
    if zigzag:
        if source < rank:
            return Block(everything, slice(None, half), False)
        return Block(slice(half, None), everything, False)
    return Block(everything, everything, False) if source < rank else None


class RingAttention(DotProductAttention):
    """``DotProductAttention`` over the ranks of ``mesh``, each with a part of the sequence.

    In each of n steps a rank computes with the keys and values that it has, passing them on to the
    next rank meanwhile, and merges results by the logarithms of their softmax's denominators; it
    never has more than two ranks' keys besides its own. Backward goes round again, and the
    gradients of keys and values travel with them. Liu et al., "Ring Attention", arXiv:2310.01889;
    why causal attention in a row leaves ranks idle: Brandon et al., "Striped Attention",
    arXiv:2311.09431.

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
        scale = 1 / math.sqrt(q.shape[-1])
        out, logs = q, q
        ring = _Ring(self.group, namespace(k).stack([k, v]), _KEYS)
        for step in range(self.group.size()):
            passing = ring.start() if step + 1 < self.group.size() else None
            block = self._block(step, q.shape[1])
            if block is not None:
                rows, keys, causal = block
                held = ring.held[:, :, keys]
                part = attend(q[:, rows], held[0], held[1], scale, causal)
                if step == 0:
                    out, logs = part
                else:
                    own = logs[..., rows, :]
                    out[:, rows], logs[..., rows, :] = merge(out[:, rows], own, *part)
            if passing is not None:
                passing()
        self.save_for_backward((q, k, v, out, logs))
        return out.astype(q.dtype, copy=False)

    def backward(self, grad: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of q, k and v, of this rank's places."""
        if self.group.size() == 1:
            return super().backward(grad)
        q, k, v, out, logs = self.saved()
        xp, size, scale = namespace(q), self.group.size(), 1 / math.sqrt(q.shape[-1])
        along = component_along(out, grad, k.shape[2])
        ring = _Ring(self.group, xp.stack([k, v]), _KEYS)
        passing = ring.start()
        q_grad, k_grad, v_grad = attend_backward(q, k, v, grad, along, logs, scale, self.causal)
        # What others add to the gradients of these keys comes with the last step.
        travelling = _Ring(self.group, xp.zeros((2, *k.shape), dtype=k_grad.dtype), _GRADIENTS)
        added: Callable[[], None] | None = None
        for step in range(1, size):
            passing()
            if step + 1 < size:
                passing = ring.start()
            block = self._block(step, q.shape[1])
            part = None
            if block is not None:
                rows, keys, causal = block
                held = ring.held[:, :, keys]
                part = attend_backward(
                    q[:, rows],
                    held[0],
                    held[1],
                    grad[:, rows],
                    along[..., rows, :],
                    logs[..., rows, :],
                    scale,
                    causal,
                )
                q_grad[:, rows] += part[0]
            if added is not None:
                added()  # they were with the rank before, which is done with them
            if part is not None and block is not None:
                travelling.held[0][:, block.keys] += part[1]
                travelling.held[1][:, block.keys] += part[2]
            added = travelling.start()
        assert added is not None
        added()
        return (
            q_grad.astype(q.dtype, copy=False),
            (k_grad + travelling.held[0]).astype(k.dtype, copy=False),
            (v_grad + travelling.held[1]).astype(v.dtype, copy=False),
        )

    def _block(self, step: int, length: int) -> Block | None:
        rank, size = self.group.rank(), self.group.size()
        return block_of(rank, (rank - step) % size, length // 2, self.causal, self.zigzag)


class _Ring:
    """An array that goes from rank to rank, n - 1 times: two buffers, of which one is being filled.

    A rank waits for those before it only, so messages of all steps could pile up with a slow one.
    Hence each rank tells the one before it that it has begun with a step, and that one sends what
    comes a step later only then: one message goes into the buffer, and one may be under way.
    """

    def __init__(self, group: ProcessGroup, held: Array, tag: int) -> None:
        self.held = held
        self._group = group
        self._tag = tag
        self._spare: Array = namespace(held).empty_like(held)
        self._left = group.size() - 1
        self._word: Array = namespace(held).zeros(2, dtype="uint8")
        self._heard: Work[Any] | None = None
        self._told: Work[Any] | None = None

    def start(self) -> Callable[[], None]:
        """Begin to pass ``held`` on; what is returned waits until it is the one from before."""
        group, held, spare = self._group, self.held, self._spare
        rank, size = group.rank(), group.size()
        before, after = (rank - 1) % size, (rank + 1) % size
        receiving = group.irecv(spare, tag=self._tag, group_src=before)
        for work in (self._heard, self._told):
            if work is not None:
                work.wait()
        sending = group.isend(held, tag=self._tag, group_dst=after)
        self._left -= 1
        if self._left:
            self._told = group.isend(self._word[:1], tag=self._tag + _BEGUN, group_dst=before)
            self._heard = group.irecv(self._word[1:], tag=self._tag + _BEGUN, group_src=after)

        def finish() -> None:
            for work in (receiving, sending):
                assert work is not None
                work.wait()
            self.held, self._spare = spare, held

        return finish
