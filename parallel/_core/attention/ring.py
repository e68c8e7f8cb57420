"""Ring attention: keys and values go from rank to rank, results are merged as they come.

Liu et al., "Ring Attention", arXiv:2310.01889; why causal attention in a row leaves ranks idle:
Brandon et al., "Striped Attention", arXiv:2311.09431. In each of n steps a rank computes with the
keys and values that it has, and passes them on meanwhile. It never has more than two ranks' keys
besides its own. Backward goes round again, and the gradients of keys and values travel with them.
The places of the sequence are whose: in a row, or a zig-zag that balances causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from meshlib import ProcessGroup, Work
from meshlib.extend import to_whole_number
from parallel._arrays import Array, Namespace, added_at, put_at
from parallel._checks import check_array
from parallel._core.attention.dot_product import (
    ROWS,
    attend,
    attend_backward,
    component_along,
    merge,
)
from parallel._groups import GroupLike, resolve


def sequence_positions(
    length: int, mesh: GroupLike | None = None, *, zigzag: bool = True
) -> npt.NDArray[np.int64]:
    """Return the positions in the sequence of this rank's ``length`` places, (length,).

    A zig-zag cuts the sequence into two chunks for each of n ranks, and rank r has chunks r and 2n
    - 1 - r. Few keys precede the early chunk and many precede the late one, so causal attention
    costs all ranks the same. In a row, rank r has the r-th of n chunks.

    Args:
        length: The number of places on each rank; even for a zig-zag.
        mesh: The ranks: ``mesh["cp"]``, a process group, or None for the default group.
        zigzag: Use the zig-zag order, not consecutive places.

    Returns:
        Whole numbers in [0, length * n), ascending.

    Raises:
        ValueError: For an odd length and a zig-zag.
        TypeError: For a value that is not an integer or a set of ranks.
    """
    return positions_of(to_whole_number(length, "length"), resolve(mesh, "mesh"), zigzag)


def positions_of(length: int, group: ProcessGroup, zigzag: bool) -> npt.NDArray[np.int64]:
    """Return ``sequence_positions`` over a group."""
    rank, size = group.rank(), group.size()
    if not zigzag:
        return np.arange(rank * length, (rank + 1) * length)
    half = half_of(length, size)
    late = (2 * size - 1 - rank) * half
    return np.concatenate([np.arange(rank * half, (rank + 1) * half), np.arange(late, late + half)])


def half_of(length: int, size: int) -> int:
    """Return the length of one of a rank's two chunks; raise ValueError when that is not whole."""
    half, rest = divmod(length, 2)
    if rest:
        raise ValueError(
            f"each of {size} ranks has {length} places of a sequence of {length * size}, which"
            f" does not divide by the {2 * size} chunks of a zig-zag, two for each rank"
        )
    return half


def split_sequence(
    x: Array, mesh: GroupLike | None = None, *, dim: int = 1, zigzag: bool = True
) -> Array:
    """Return this rank's places of whole sequences, the same on all ranks: nothing is sent.

    Args:
        x: An array whose dim ``dim`` is the sequence, such as tokens (batch, length).
        mesh: The ranks: ``mesh["cp"]``, a process group, or None for the default group.
        dim: The dim of the sequence.
        zigzag: The order, see ``sequence_positions``; that of the attention.

    Returns:
        A copy with 1/n of the places.

    Raises:
        ValueError: For a length that does not divide by the ranks, or by twice their number for a
            zig-zag, or a dim that is not there.
        TypeError: For a value that is not an array or a set of ranks.
    """
    check_array(x, "x")
    group = resolve(mesh, "mesh")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"x of shape {list(x.shape)} has no dim {dim}")
    length, rest = divmod(x.shape[dim], group.size() * (2 if zigzag else 1))
    if rest:
        chunks = f"{2 * group.size()} chunks of a zig-zag, two for each" if zigzag else "parts for"
        raise ValueError(
            f"dim {dim} of x is {x.shape[dim]} long, which does not divide by the {chunks} of"
            f" {group.size()} ranks"
        )
    return x.take(positions_of(length * (2 if zigzag else 1), group, zigzag), axis=dim)


KEYS, GRADIENTS = 0, 1
"""Tags: what one rank sends the next in a step."""
_BEGUN = 2  # and, added to these, that it has begun with the step


class VisibleBlock(NamedTuple):
    """Queries here that attend to a part of the keys that came, causally or to all of them."""

    queries: slice
    keys: slice
    causal: bool


class Rotation(Protocol):
    """An array on its way to the next rank, while that of the rank before is coming."""

    @property
    def x(self) -> Array:
        """The array that was given: to be read until ``done``."""
        ...

    def done(self, after: Any) -> Array:
        """Wait until the arrays ``after`` are computed, then for the message; return it."""
        ...


class RingRotator(Protocol):
    """Passes arrays on to the next rank; one kind of array for each tag."""

    def start(self, x: Array, tag: int) -> Rotation:
        """Begin to send ``x`` to the next rank, and to receive that of the rank before."""
        ...


@dataclass(frozen=True)
class RingAlgorithm:
    """Attention of rank ``rank`` of ``size`` ranks, which have equally long parts of a sequence.

    ``xp`` is the library of the arrays, ``rows`` how many queries are computed at a time.
    """

    xp: Namespace
    rank: int
    size: int
    causal: bool
    zigzag: bool
    rows: int = ROWS

    def block(self, source: int, half: int) -> VisibleBlock | None:
        """Return the computation with the keys of rank ``source``; None if no query sees them.

        ``half`` is the length of a chunk of a zig-zag, of which each rank has two. All queries see
        the early chunk of a rank before this one, and none its late chunk. The late queries see all
        keys of a rank after this one. So each step but the first is half of a block.
        """
        everything = slice(None)
        if not self.causal or self.rank == source:
            return VisibleBlock(everything, everything, self.causal)
        if self.zigzag:
            if source < self.rank:
                return VisibleBlock(everything, slice(None, half), False)
            return VisibleBlock(slice(half, None), everything, False)
        return VisibleBlock(everything, everything, False) if source < self.rank else None

    def forward(self, carrier: RingRotator, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Return this rank's places of the result, float32 or wider, and the logarithms."""
        xp, held, out, logs = self.xp, self.xp.stack([k, v]), q, q
        for step in range(self.size):
            passing = carrier.start(held, KEYS) if step + 1 < self.size else None
            if passing is not None:
                held = passing.x
            block = self.block((self.rank - step) % self.size, q.shape[1] // 2)
            if block is not None:
                own = (slice(None), block.queries)
                of_logs = (..., block.queries, slice(None))
                keys = self._seen(held, block)
                part = attend(xp, q[own], *keys, causal=block.causal, rows=self.rows)
                if step == 0:
                    out, logs = part
                else:
                    part = merge(xp, out[own], logs[of_logs], *part)
                    out, logs = put_at(out, own, part[0]), put_at(logs, of_logs, part[1])
            if passing is not None:
                held = passing.done((out, logs))
        return out, logs

    def backward(
        self,
        carrier: RingRotator,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        logs: Array,
        grad: Array,
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of this rank's q, k and v, float32 or wider.

        ``out`` and ``logs`` are what ``forward`` returned, ``grad`` is the gradient of ``out``.
        """
        xp, along = self.xp, component_along(out, grad, k.shape[2])
        held, travelling, q_grad, own_keys = xp.stack([k, v]), None, q, k
        keys_passing = gradients_passing = None
        part: list[Array] = []
        for step in range(self.size):
            if keys_passing is not None:
                held = keys_passing.done((q_grad, part))
            keys_passing = carrier.start(held, KEYS) if step + 1 < self.size else None
            if keys_passing is not None:
                held = keys_passing.x
            block = self.block((self.rank - step) % self.size, q.shape[1] // 2)
            if block is not None:
                own, of_logs = (slice(None), block.queries), (..., block.queries, slice(None))
                of_queries, *part = attend_backward(
                    xp,
                    q[own],
                    *self._seen(held, block),
                    grad[own],
                    along[of_logs],
                    logs[of_logs],
                    causal=block.causal,
                    rows=self.rows,
                )
                q_grad = of_queries if step == 0 else added_at(q_grad, own, of_queries)
            if step == 0:
                own_keys = xp.stack(part)
                # The last step brings other ranks' contributions to the gradients of these keys.
                travelling = xp.zeros_like(own_keys)
                continue
            if gradients_passing is not None:
                # They were with the rank before, which is done with them.
                travelling = gradients_passing.done((q_grad, part))
            if block is not None:
                at = (slice(None), slice(None), block.keys)
                travelling = added_at(travelling, at, xp.stack(part))
            gradients_passing = carrier.start(travelling, GRADIENTS)
        if gradients_passing is not None:
            own_keys = own_keys + gradients_passing.done(own_keys)
        return q_grad, own_keys[0], own_keys[1]

    def _seen(self, held: Array, block: VisibleBlock) -> tuple[Array, Array]:
        return held[0][:, block.keys], held[1][:, block.keys]


class MessageRotator:
    """Passes arrays on by messages of ``group``: n - 1 times, from one buffer into another.

    A rank waits for those before it only, so messages of all steps could pile up with a slow one.
    So each rank tells the one before it when it begins a step. Only then that rank sends the next
    step's message: one message goes into the buffer, and one may be under way.
    """

    def __init__(self, group: ProcessGroup, xp: Namespace) -> None:
        self._group, self._xp = group, xp
        self._lines: dict[int, _Line] = {}

    def start(self, x: Array, tag: int) -> Rotation:
        """Begin to send ``x`` to the next rank, and to receive that of the rank before."""
        line = self._lines.get(tag)
        if line is None:
            line = self._lines[tag] = _Line(self._group, self._xp, tag)
        return line.start(x)


class _Line:
    """The messages of one tag."""

    def __init__(self, group: ProcessGroup, xp: Namespace, tag: int) -> None:
        self._group, self._xp, self._tag = group, xp, tag
        self._words: Array = xp.zeros(2, dtype="uint8")
        self._left = group.size() - 1
        self._spare: Array = None
        self._heard: Work[Any] | None = None
        self._told: Work[Any] | None = None

    def start(self, x: Array) -> _MessageRotation:
        group, tag = self._group, self._tag
        rank, size = group.rank(), group.size()
        before, after = (rank - 1) % size, (rank + 1) % size
        if self._spare is None:
            self._spare = self._xp.empty_like(x)
        receiving = group.irecv(self._spare, tag=tag, group_src=before)
        for work in (self._heard, self._told):
            if work is not None:
                work.wait()
        sending = group.isend(x, tag=tag, group_dst=after)
        self._left -= 1
        if self._left:
            self._told = group.isend(self._words[:1], tag=tag + _BEGUN, group_dst=before)
            self._heard = group.irecv(self._words[1:], tag=tag + _BEGUN, group_src=after)
        coming, self._spare = self._spare, x
        return _MessageRotation(x, coming, (receiving, sending))


class _MessageRotation(NamedTuple):
    x: Array
    coming: Array
    works: tuple[Work[Any] | None, ...]

    def done(self, after: Any) -> Array:
        del after  # computed when it was asked for
        for work in self.works:
            assert work is not None
            work.wait()
        return self.coming
