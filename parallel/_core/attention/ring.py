"""Ring attention: keys and values go from rank to rank, results are merged as they come.

Liu et al., "Ring Attention", arXiv:2310.01889; why causal attention in a row leaves ranks idle:
Brandon et al., "Striped Attention", arXiv:2311.09431. In each of n steps a rank computes with the
keys and values that it has, and passes them on meanwhile. It never has more than two ranks' keys
besides its own. Backward goes round again, and the gradients of keys and values travel with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from meshlib import ProcessGroup, Work
from parallel._arrays import Array, Namespace, added_at, put_at
from parallel._core.attention.dot_product import (
    ROWS,
    attend,
    attend_backward,
    component_along,
    merge,
)

KEYS, GRADIENTS = 0, 1
"""Tags: what one rank sends the next in a step."""
_BEGUN = 2  # and, added to these, that it has begun with the step


class Block(NamedTuple):
    """Which of the queries here see which of the keys that came, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


class Passing(Protocol):
    """An array on its way to the next rank, while that of the rank before is coming."""

    @property
    def x(self) -> Array:
        """The array that was given: to be read until ``done``."""
        ...

    def done(self, after: Any) -> Array:
        """Wait until the arrays ``after`` are computed, then for the message; return it."""
        ...


class Carrier(Protocol):
    """Passes arrays on to the next rank; one kind of array for each tag."""

    def start(self, x: Array, tag: int) -> Passing:
        """Begin to send ``x`` to the next rank, and to receive that of the rank before."""
        ...


@dataclass(frozen=True)
class Ring:
    """Attention of rank ``rank`` of ``size`` ranks, which have equally long parts of a sequence.

    ``xp`` is the library of the arrays, ``rows`` how many queries are computed at a time.
    """

    xp: Namespace
    rank: int
    size: int
    causal: bool
    zigzag: bool
    rows: int = ROWS

    def block(self, source: int, half: int) -> Block | None:
        """Return what is computed with the keys of rank ``source``; None: no query sees them.

        ``half`` is the length of a chunk of a zig-zag, of which each rank has two. All queries see
        the early chunk of a rank before this one, and none its late chunk. The late queries see all
        keys of a rank after this one. So each step but the first is half of a block.
        """
        everything = slice(None)
        if not self.causal or self.rank == source:
            return Block(everything, everything, self.causal)
        if self.zigzag:
            if source < self.rank:
                return Block(everything, slice(None, half), False)
            return Block(slice(half, None), everything, False)
        return Block(everything, everything, False) if source < self.rank else None

    def forward(self, carrier: Carrier, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
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
        self, carrier: Carrier, q: Array, k: Array, v: Array, out: Array, logs: Array, grad: Array
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
                # What the others add to the gradients of these keys comes with the last step.
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

    def _seen(self, held: Array, block: Block) -> tuple[Array, Array]:
        return held[0][:, block.keys], held[1][:, block.keys]


class MessageCarrier:
    """Passes arrays on by messages of ``group``: n - 1 times, from one buffer into another.

    A rank waits for those before it only, so messages of all steps could pile up with a slow one.
    So each rank tells the one before it when it begins a step. Only then that rank sends the next
    step's message: one message goes into the buffer, and one may be under way.
    """

    def __init__(self, group: ProcessGroup, xp: Namespace) -> None:
        self._group, self._xp = group, xp
        self._lines: dict[int, _Line] = {}

    def start(self, x: Array, tag: int) -> Passing:
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

    def start(self, x: Array) -> _Passing:
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
        return _Passing(x, coming, (receiving, sending))


class _Passing(NamedTuple):
    x: Array
    coming: Array
    works: tuple[Work[Any] | None, ...]

    def done(self, after: Any) -> Array:
        del after  # computed when it was asked for
        for work in self.works:
            assert work is not None
            work.wait()
        return self.coming
