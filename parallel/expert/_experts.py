"""Many feed-forward networks of one shape, each with rows of its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from meshlib import DeviceMesh
from meshlib.sharding import Sharding
from parallel._arrays import Array, namespace
from parallel._checks import check_generator, check_instance, to_count, to_floating
from parallel._groups import Ranks, resolve
from parallel.nn._global_part import GlobalPart
from parallel.nn._layers.activations import GELU
from parallel.nn._layers.linear import check_input, uniform_init
from parallel.nn._module import Module
from parallel.nn._parameter import Parameter
from parallel.tensor_parallel._regions import part_size


class GroupedLinear(Module):
    """``y = x @ weight[:, e].T`` for the rows x of each expert e.

    The weight is (out_features, experts, in_features), with the experts in the middle: so
    ``fully_shard``, which splits dim 0, splits every expert alike.

    Args:
        weight: of the experts that are here.
        grad_scale: what the weight's gradient is multiplied by.

    Raises:
        TypeError: for what is no array.
        ValueError: for an array that has not three dims.
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

    Expert e is on rank ``e // (count / size)`` of ``ep``, and of each expert the hidden features
    are split over ``tp``: what ``forward`` returns is this tp rank's term of a sum then. Gradients
    of the weights are divided by the size of ``ep``: they have contributions from the tokens of all
    its ranks, and the losses of ranks that share a batch are averaged. Average them over the
    experts' replicas only.

    Args:
        count: how many experts there are on all ranks of ``ep``.
        dim: the size of a token.
        hidden: that between the two layers, over all ranks of ``tp``.
        ep: the ranks that the experts are split over: ``mesh["ep"]``. None: all are here.
        tp: the ranks that each expert is split over: ``mesh["tp"]``. None: each is whole.
        activation: makes the module between the two layers, element by element.
        rng: draws the weights of all experts, uniformly within 1/sqrt of what is summed over; in
            the same state on all ranks, which then have what one process has.
        dtype: of the weights.

    Raises:
        ValueError: when experts or hidden features do not divide by the ranks, for numbers below
            1, or a dtype that is not floating.
        TypeError: for arguments of another type.
    """

    def __init__(
        self,
        count: int,
        dim: int,
        hidden: int,
        *,
        ep: Ranks | None = None,
        tp: Ranks | None = None,
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

    def _note_split(self, ep: Ranks | None, tp: Ranks | None, dim: int, hidden: int) -> None:
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


def _own_part(total: int, ranks: Ranks, name: str, what: str) -> slice:
    """Return which of ``total`` things are this rank's."""
    group = resolve(ranks, name)
    width = part_size(total, group, what)
    return slice(group.rank() * width, (group.rank() + 1) * width)
