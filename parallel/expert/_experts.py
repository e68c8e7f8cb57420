"""Experts, each with rows of its own, and how the rows travel to them and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib import DeviceMesh, ProcessGroup
from meshlib.sharding import Sharding
from parallel._arrays import Array, namespace
from parallel._checks import check_generator, check_instance, to_count, to_floating
from parallel._core.experts import by_arrival, by_expert
from parallel._groups import GroupLike, resolve
from parallel.nn._layers.linear import check_input, uniform_init
from parallel.nn._layers.simple import GELU
from parallel.nn._module import Module
from parallel.nn._parameter import GlobalPart, Parameter
from parallel.tensor_parallel._parts import part_size


class Dispatch:
    """The routes of this rank's tokens to experts, for one forward pass and its backward.

    Rows are sorted by expert, sent to the expert's rank, and sorted by expert there again, over
    those of all ranks. Only rows are sent that an expert works on, as many as there are, with no
    padding: an uneven all-to-all, after one of a count for each expert. Lepikhin et al., "GShard",
    arXiv:2006.16668, algorithm 2, with rows in place of its masks.

    All ranks of ``group`` make one at the same time.

    Args:
        experts: The experts that each token chose, (tokens, top_k), the best first.
        count: The number of experts; rank i of ``group`` has the i-th equal part of them.
        group: The ranks that have them. None: all are here.
        capacity: The most rows that each expert takes from this rank. Further rows are dropped:
            last choices first, and of these the last tokens. None: all.
    """

    def __init__(
        self,
        experts: Array,
        count: int,
        group: ProcessGroup | None = None,
        capacity: int | None = None,
    ) -> None:
        xp = namespace(experts)
        tokens, top_k = experts.shape
        self.tokens: int = int(tokens)
        self.top_k: int = int(top_k)
        self._group = group if group is not None and group.size() > 1 else None
        rows, counts = by_expert(xp, experts, count, capacity)
        counts = _on_host(counts)
        rows = rows[: int(counts.sum())]
        self.rows: Array = rows
        """The choices that are sent, in the order in which they are: choice * tokens + token."""
        self._merge: Array | None = None
        self._exchange_counts(counts)

    def _exchange_counts(self, counts: Any) -> None:
        group = self._group
        if group is None:
            self.counts: list[int] = counts.tolist()
            """The number of rows for each of this rank's experts, from all ranks."""
            self._sent = self._received = [len(self.rows)]
            return
        outgoing = np.ascontiguousarray(counts.reshape(group.size(), -1), dtype=np.int64)
        incoming = np.empty_like(outgoing)
        group.all_to_all_single(incoming, outgoing)
        self.counts = incoming.sum(axis=0).tolist()
        self._sent = outgoing.sum(axis=1).tolist()
        self._received = incoming.sum(axis=1).tolist()
        if incoming.shape[1] > 1:
            order = by_arrival(np, incoming, int(incoming.sum()))
            self._merge = namespace(self.rows).asarray(order)

    @property
    def dropped(self) -> int:
        """The number of this rank's token choices that no expert takes."""
        return self.tokens * self.top_k - len(self.rows)

    @property
    def tokens_of_rows(self) -> Array:
        """The token of each row."""
        return self.rows % max(self.tokens, 1)

    def send(self, rows: Array) -> Callable[[], Array]:
        """Begin to send rows, (sent, d), to their experts.

        The returned function waits, and returns the rows of the experts here, (received, d), in
        their order. Leave ``rows`` alone until then.
        """
        arrived = self._move(rows, self._received, self._sent)

        def finish() -> Array:
            received = arrived()
            return received if self._merge is None else received[self._merge]

        return finish

    def send_back(self, rows: Array) -> Callable[[], Array]:
        """Begin to send the experts' rows, (received, d), to where they came from.

        The returned function waits, and returns the rows in the order of ``rows``, (sent, d).
        """
        if self._merge is not None:
            parted = namespace(rows).empty_like(rows)
            parted[self._merge] = rows
            rows = parted
        return self._move(rows, self._sent, self._received)

    def _move(self, rows: Array, into: list[int], out_of: list[int]) -> Callable[[], Array]:
        group = self._group
        if group is None:
            return lambda: rows
        xp = namespace(rows)
        result = xp.empty((sum(into), rows.shape[1]), dtype=rows.dtype)
        work = group.all_to_all_single(
            result, xp.ascontiguousarray(rows), into, out_of, async_op=True
        )

        def finish() -> Array:
            work.wait()
            return result

        return finish

    def by_choice(self, rows: Array) -> Array:
        """Return rows, (sent, d), by choice and token: (top_k, tokens, d); dropped ones are 0."""
        whole = namespace(rows).zeros((self.top_k * self.tokens, rows.shape[1]), dtype=rows.dtype)
        whole[self.rows] = rows
        return whole.reshape(self.top_k, self.tokens, rows.shape[1])


def _on_host(counts: Array) -> Any:
    """Return small integers as a NumPy array: the sizes of messages are known on the host."""
    return counts.get() if hasattr(counts, "get") else counts


class GroupedLinear(Module):
    """``y = x @ weight[:, e].T`` for the rows x of each expert e.

    The weight is (out_features, experts, in_features), with the experts in the middle: so
    ``fully_shard``, which splits dim 0, splits every expert alike.

    Args:
        weight: Of the experts that are here.
        grad_scale: The factor of the weight's gradient.

    Raises:
        TypeError: For a value that is not an array.
        ValueError: For an array that has not three dims.
    """

    def __init__(self, weight: Array, grad_scale: float = 1.0) -> None:
        super().__init__()
        self.weight: Parameter = Parameter(weight)
        self.grad_scale = grad_scale
        if weight.ndim != 3:
            raise ValueError(
                "weight must be of shape (out_features, experts, in_features), got "
                f"{list(weight.shape)}"
            )

    def forward(self, x: Array, counts: list[int]) -> Array:
        """Map rows (n, in_features), ``counts[e]`` of them expert e's, to (n, out_features).

        Raises ValueError for counts that are not one for each expert, or not n in all.
        """
        check_input(x, self.weight, self.weight.shape[2], type(self).__qualname__)
        _, experts, _ = self.weight.shape
        if len(counts) != experts or sum(counts) != len(x):
            raise ValueError(
                f"counts must be {experts} numbers that sum to the {len(x)} rows, got {counts}"
            )
        self.save_for_backward((x, counts))
        y = namespace(x).empty((len(x), self.weight.shape[0]), dtype=x.dtype)
        for e, rows in _slices(counts):
            y[rows] = x[rows] @ self.weight.data[:, e].T
        return y

    def backward(self, grad: Array) -> Array:
        """Map (n, out_features) to (n, in_features)."""
        x, counts = self.saved()
        self.defer(lambda: self._accumulate(x, counts, grad))
        input_grad = namespace(grad).empty_like(x)
        for e, rows in _slices(counts):
            input_grad[rows] = grad[rows] @ self.weight.data[:, e]
        return input_grad

    def _accumulate(self, x: Array, counts: list[int], grad: Array) -> None:
        total = namespace(grad).zeros(self.weight.shape, dtype=grad.dtype)
        for e, rows in _slices(counts):
            total[:, e] = grad[rows].T @ x[rows]
        if self.grad_scale != 1:
            total *= grad.dtype.type(self.grad_scale)
        self.weight.accumulate_grad(total)


def _slices(counts: list[int]) -> list[tuple[int, slice]]:
    """Return (expert, its rows) for the experts that have any."""
    ends = np.cumsum([0, *counts]).tolist()
    return [(e, slice(ends[e], ends[e + 1])) for e, count in enumerate(counts) if count]


class Experts(Module):
    """``count`` networks ``down(activation(up(x)))``, those of this rank.

    Expert e is on rank ``e // (count / size)`` of ``ep``. Over ``tp``, each expert's hidden
    features are split, and ``forward`` returns this tp rank's term of a sum. The gradients of the
    weights include the tokens of all ranks of ``ep``. They are divided by the size of ``ep``,
    because the losses of ranks that share a batch are averaged. Average them over the experts'
    replicas only.

    Args:
        count: The number of experts on all ranks of ``ep``.
        dim: The size of a token.
        hidden: That between the two layers, over all ranks of ``tp``.
        ep: The ranks that the experts are split over: ``mesh["ep"]``. None: all are here.
        tp: The ranks that each expert is split over: ``mesh["tp"]``. None: each is whole.
        activation: Makes the module between the two layers, element by element.
        rng: Draws the weights of all experts, uniformly within 1/sqrt of what is summed over; in
            the same state on all ranks, which then have what one process has.
        dtype: Of the weights.

    Raises:
        ValueError: When experts or hidden features do not divide by the ranks, for numbers below
            1, or a dtype that is not floating.
        TypeError: For arguments of another type.
    """

    def __init__(
        self,
        count: int,
        dim: int,
        hidden: int,
        *,
        ep: GroupLike | None = None,
        tp: GroupLike | None = None,
        activation: Callable[[], Module] = GELU,
        rng: np.random.Generator,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        self.count: int = to_count(count, "count")
        dim = to_count(dim, "dim")
        hidden = to_count(hidden, "hidden")
        check_generator(rng)
        dtype = to_floating(dtype, "dtype")
        own, features = slice(0, count), slice(0, hidden)
        scale = 1.0
        if ep is not None:
            own = _own_part(count, ep, "ep", "experts")
            scale = 1 / resolve(ep, "ep").size()
        if tp is not None:
            features = _own_part(hidden, tp, "tp", "hidden")
        up = np.empty((features.stop - features.start, own.stop - own.start, dim), dtype)
        down = np.empty((dim, own.stop - own.start, features.stop - features.start), dtype)
        for e in range(count):
            # All are drawn, one at a time, and this rank's are kept.
            first = uniform_init((hidden, dim), 1 / math.sqrt(dim), rng, dtype)
            second = uniform_init((dim, hidden), 1 / math.sqrt(hidden), rng, dtype)
            if own.start <= e < own.stop:
                up[:, e - own.start] = first[features]
                down[:, e - own.start] = second[:, features]
        self.up: GroupedLinear = GroupedLinear(up, scale)
        self.activation: Module = activation()
        check_instance(self.activation, Module, "activation()", "nn.GELU()")
        self.down: GroupedLinear = GroupedLinear(down, scale)
        self._note_split(ep, tp, dim, hidden)

    def _note_split(
        self, ep: GroupLike | None, tp: GroupLike | None, dim: int, hidden: int
    ) -> None:
        """Say in the parameters which parts of which global arrays they are."""
        meshes = [m for m in (ep, tp) if isinstance(m, DeviceMesh)]
        if not meshes or len(meshes) != sum(m is not None for m in (ep, tp)):
            return  # a group has no dims that could be named
        mesh = DeviceMesh.concatenate(meshes)
        ends = 0 if ep is None else meshes[0].ndim
        over_ep, over_tp = tuple(range(ends)), tuple(range(ends, mesh.ndim))
        for layer, shape, dims in (
            (self.up, (hidden, self.count, dim), [over_tp, over_ep]),
            (self.down, (dim, self.count, hidden), [(), over_ep, over_tp]),
        ):
            layer.weight.global_part = GlobalPart(Sharding.of_positions(mesh, dims), shape)

    def forward(self, x: Array, counts: list[int]) -> Array:
        """Map rows (n, dim), ``counts[e]`` of them the e-th expert's here, to the same shape."""
        hidden = self.activation(self.up(x, counts))
        return self.down(hidden, counts)

    def backward(self, grad: Array) -> Array:
        """Map (n, dim) to the same shape."""
        return self.up.backward(self.activation.backward(self.down.backward(grad)))


def _own_part(total: int, ranks: GroupLike, name: str, what: str) -> slice:
    """Return which of ``total`` things are this rank's."""
    group = resolve(ranks, name)
    width = part_size(total, group, what)
    return slice(group.rank() * width, (group.rank() + 1) * width)
