"""Linear layers whose weight is split over ``mesh["tp"]``.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3. A column-parallel layer followed by an
element-wise activation and a row-parallel one costs one all-reduce forward (in the second) and one
backward (in the first).

All ranks of the group pass the same samples through the layer. Each layer begins as a whole
``Linear``: constructed with generators in the same state, or from a layer with the same values, the
shards are exactly those of the layer on one process.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from meshlib import DeviceMesh, ProcessGroup
from meshlib.sharding import DArray, Sharding
from parallel.arrays import Array, namespace
from parallel.checks import check_instance, to_count
from parallel.groups import Ranks, resolve
from parallel.nn.linear import Linear, check_last
from parallel.nn.module import Module
from parallel.nn.parameter import Parameter
from parallel.tensor_parallel.regions import gather, part_size, reduce, split, start_reduce


class _ShardedLinear(Module):
    """What both layers do alike: begin as a whole ``Linear``, of which each rank keeps its part.

    ``split`` names the size that is divided by the number of ranks.
    """

    split: ClassVar[str]
    group: ProcessGroup

    def _cut(
        self,
        sizes: tuple[int, int],
        mesh: Ranks | None,
        bias: bool,
        rng: np.random.Generator,
        dtype: npt.DTypeLike,
    ) -> None:
        """Draw a layer of ``sizes``, (in_features, out_features), and keep this rank's part."""
        self._place(mesh)
        for size, name in zip(sizes, ("in_features", "out_features"), strict=True):
            # Before a whole matrix is drawn in vain.
            if to_count(size, name) and name == self.split:
                part_size(size, self.group, name)
        self._keep(Linear(*sizes, bias, rng=rng, dtype=dtype))

    @classmethod
    def _part_of(cls, linear: Linear, mesh: Ranks | None) -> Self:
        """Return a layer that holds this rank's part of a copy of ``linear``."""
        check_instance(linear, Linear, "linear")
        layer = cls.__new__(cls)
        Module.__init__(layer)
        layer._place(mesh)
        layer._keep(linear)
        return layer

    def _place(self, mesh: Ranks | None) -> None:
        self.group = resolve(mesh, "mesh")
        self._mesh = mesh if isinstance(mesh, DeviceMesh) else None

    def _note_split(self, parameter: Parameter, dim: int | None) -> None:
        """Say in the parameter that it is a part along ``dim``, or (None) the same on all ranks."""
        if self._mesh is None:  # a group has no dims that could be named
            return
        shape = list(parameter.shape)
        dims: list[tuple[int, ...]] = []
        if dim is not None:
            shape[dim] *= self.group.size()
            dims = [*[()] * dim, tuple(range(self._mesh.ndim))]
        parameter.split = Sharding.of_positions(self._mesh, dims), tuple(shape)

    def _gathered(self, parameter: Parameter, dim: int) -> Array:
        """Return the global array of a parameter that is split along ``dim``, a new one."""
        if isinstance(parameter.value, DArray):  # split again, by ``fully_shard``
            return parameter.value.full_array()
        moved = namespace(parameter.data).moveaxis(parameter.data, dim, -1)
        return namespace(moved).moveaxis(gather(moved, self.group), -1, dim).copy()

    def _own_features(self, whole: Linear) -> slice:
        """Return which of the features that are split are this rank's."""
        width = part_size(getattr(whole, self.split), self.group, self.split)
        return slice(self.group.rank() * width, (self.group.rank() + 1) * width)

    @abstractmethod
    def _keep(self, whole: Linear) -> None:
        """Take over this rank's part of ``whole``, as a copy."""


class ColwiseParallel(_ShardedLinear):
    """A Linear whose output features are split: rank i computes the i-th block of columns of y.

    Args:
        in_features: the size of the last dimension of the input, whole on every rank.
        out_features: that of the output over all ranks; must divide by their number.
        mesh: the ranks: ``mesh["tp"]``, a process group, or None for the default group.
        bias: whether there is one (split like the output).
        gather_output: return the whole output, (..., out_features), on every rank, instead of this
            rank's block, (..., out_features / size).
        rng: draws the values of the whole layer; in the same state on all ranks.
        dtype: of the parameters.

    Raises:
        ValueError: when out_features does not divide by the number of ranks, for sizes below 1, or
            a dtype that is not floating.
        TypeError: for arguments of another type.
    """

    split = "out_features"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Ranks | None = None,
        bias: bool = True,
        *,
        gather_output: bool = False,
        rng: np.random.Generator,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        self.gather_output = gather_output
        self._cut((in_features, out_features), mesh, bias, rng, dtype)

    @classmethod
    def from_linear(
        cls, linear: Linear, mesh: Ranks | None = None, *, gather_output: bool = False
    ) -> Self:
        """Return the layer that holds this rank's part of a copy of ``linear``.

        Raises TypeError for what is no ``Linear``, ValueError where its features do not divide.
        """
        layer = cls._part_of(linear, mesh)
        layer.gather_output = gather_output
        return layer

    def _keep(self, whole: Linear) -> None:
        rows = self._own_features(whole)
        self.linear: Linear = Linear.holding(
            whole.weight.data[rows].copy(),
            None if whole.bias is None else whole.bias.data[rows].copy(),
        )
        for parameter in self.linear.parameters():
            self._note_split(parameter, 0)

    def to_linear(self) -> Linear:
        """Return the whole layer, a copy, on every rank. A collective."""
        bias = self.linear.bias
        return Linear.holding(
            self._gathered(self.linear.weight, 0),
            None if bias is None else self._gathered(bias, 0),
        )

    def forward(self, x: Array) -> Array:
        """Map (..., in_features) to (..., out_features / size), or whole if gathered."""
        y = self.linear(x)
        return gather(y, self.group) if self.gather_output else y

    def backward(self, grad: Array) -> Array:
        """Map the output's gradient to the whole input's, the same on every rank."""
        if self.gather_output:
            grad = split(grad, self.group)
        x = self.linear.saved()
        # f: this sum goes on while the parameters' gradients are computed.
        input_grad = grad @ self.linear.weight.data
        summing = start_reduce(input_grad, self.group)
        self.linear.accumulate(x, grad)
        if summing is not None:
            summing.wait()
        return input_grad


def whole_copy(parameter: Parameter) -> Array:
    """Return the global array of a parameter that this layer does not split, a new one."""
    value = parameter.value
    return value.full_array() if isinstance(value, DArray) else value.copy()


class RowwiseParallel(_ShardedLinear):
    """A Linear whose input features are split: each rank holds a block of columns of the weight.

    Args:
        in_features: the size of the last dimension of the input over all ranks; must divide by
            their number.
        out_features: the size of the last dimension of the output, whole on every rank.
        mesh: the ranks: ``mesh["tp"]``, a process group, or None for the default group.
        bias: whether there is one (whole on every rank, added once).
        input_is_parallel: the input is this rank's block, (..., in_features / size), such as a
            ``ColwiseParallel`` layer returns; otherwise whole and the same on every rank.
        rng: draws the values of the whole layer; in the same state on all ranks.
        dtype: of the parameters.

    Raises:
        ValueError: when in_features does not divide by the number of ranks, for sizes below 1, or
            a dtype that is not floating.
        TypeError: for arguments of another type.
    """

    split = "in_features"
    bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Ranks | None = None,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        rng: np.random.Generator,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        super().__init__()
        self.input_is_parallel = input_is_parallel
        self._cut((in_features, out_features), mesh, bias, rng, dtype)

    @classmethod
    def from_linear(
        cls, linear: Linear, mesh: Ranks | None = None, *, input_is_parallel: bool = True
    ) -> Self:
        """Return the layer that holds this rank's part of a copy of ``linear``.

        Raises TypeError for what is no ``Linear``, ValueError where its features do not divide.
        """
        layer = cls._part_of(linear, mesh)
        layer.input_is_parallel = input_is_parallel
        return layer

    def _keep(self, whole: Linear) -> None:
        columns = self._own_features(whole)
        self.linear: Linear = Linear.holding(whole.weight.data[:, columns].copy(), None)
        self._note_split(self.linear.weight, 1)
        self.bias = None if whole.bias is None else Parameter(whole.bias.data.copy())
        if self.bias is not None:
            self._note_split(self.bias, None)

    def to_linear(self) -> Linear:
        """Return the whole layer, a copy, on every rank. A collective."""
        return Linear.holding(
            self._gathered(self.linear.weight, 1),
            None if self.bias is None else whole_copy(self.bias),
        )

    def forward(self, x: Array) -> Array:
        """Map (..., in_features / size), or whole if not parallel, to (..., out_features)."""
        if not self.input_is_parallel:
            check_last(x, self.linear.in_features * self.group.size(), type(self).__qualname__)
            x = split(x, self.group)
        y = reduce(self.linear(x), self.group)  # g
        self.save_for_backward(None)
        if self.bias is not None:
            y += self.bias.data
        return y

    def backward(self, grad: Array) -> Array:
        """Map the output's gradient, whole on every rank, to the input's."""
        self.saved()
        if self.bias is not None:
            self.bias.accumulate_grad(grad.reshape(-1, grad.shape[-1]).sum(axis=0))
        input_grad = self.linear.backward(grad)
        return input_grad if self.input_is_parallel else gather(input_grad, self.group)
