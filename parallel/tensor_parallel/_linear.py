"""Linear layers whose weight is split over ``mesh["tp"]``.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3. A column-parallel layer, an element-wise
activation and a row-parallel layer cost two all-reduces: one forward (in the second layer) and one
backward (in the first). If the activations around them are split along the sequence, each becomes
a reduce-scatter, and the other pass has an all-gather: Korthikanti et al., arXiv:2205.05198,
section 4.2.2.

All ranks of the group pass the same samples through the layer. Each layer begins as a whole
``Linear``, which must have the same values on all ranks: from generators in the same state, or from
an equal layer. Each rank then keeps its shard of them, under the parameters' names.
"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from parallel._arrays import Array
from parallel._checks import check_instance, to_count
from parallel._groups import GroupLike
from parallel.nn._layers.linear import Linear, check_input, check_last
from parallel.tensor_parallel._parts import (
    Parts,
    Placement,
    features_split,
    gather,
    part_size,
    reduce,
    sequence_dim,
    split,
    start_gather,
    start_reduce,
)


class _ParallelLinear(Linear):
    """The base of both layers: begins as a whole ``Linear``, of which each rank keeps its part."""

    divided: ClassVar[str]
    """The name of the size that is divided among the ranks."""
    parts: Parts

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: GroupLike | None = None,
        bias: bool = True,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        rng: np.random.Generator,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        parts = Parts(mesh)
        sizes = {"in_features": in_features, "out_features": out_features}
        # Before a whole matrix is drawn in vain.
        part_size(to_count(sizes[self.divided], self.divided), parts.group, self.divided)
        super().__init__(in_features, out_features, bias, rng=rng, dtype=dtype)
        self.cut(parts, input_layouts, output_layouts)

    @classmethod
    def from_linear(
        cls,
        linear: Linear,
        mesh: GroupLike | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> Self:
        """Return the layer that holds this rank's part of a copy of ``linear``.

        Raises TypeError for what is no ``Linear``, ValueError where its features do not divide.
        """
        check_instance(linear, Linear, "linear")
        bias, parts = linear.bias, Parts(mesh)
        layer = cls.holding(linear.weight.data.copy(), None if bias is None else bias.data.copy())
        part_size(getattr(layer, cls.divided), parts.group, cls.divided)
        layer.cut(parts, input_layouts, output_layouts)
        return layer

    def cut(
        self,
        parts: Parts,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        """Keep this rank's part of a layer that is whole until now; arguments as the class's."""
        raise NotImplementedError

    def to_linear(self) -> Linear:
        """Return the whole layer, a copy, on every rank. A collective."""
        bias = None if self.bias is None else self.parts.whole(self.bias)
        return Linear.holding(self.parts.whole(self.weight), bias)


class ColumnParallelLinear(_ParallelLinear):
    """A Linear whose output features are split: rank i computes the i-th block of columns of y.

    Args:
        in_features: The size of the last dimension of the input, whole on every rank.
        out_features: That of the output over all ranks; must divide by their number.
        mesh: The ranks: ``mesh["tp"]``, a process group, or None for the default group.
        bias: Add a bias, split like the output.
        input_layouts: ``Replicate()``, the whole input on every rank, or ``Shard(1)``: the input is
            this rank's part of the sequence, dim 1, and is gathered, again in backward.
        output_layouts: None: the output is this rank's block, (..., out_features / size);
            ``Replicate()``: the whole, (..., out_features), on every rank.
        rng: Draws the values of the whole layer; in the same state on all ranks.
        dtype: Of the parameters.

    Raises:
        ValueError: When out_features does not divide by the number of ranks, for sizes below 1, or
            a dtype that is not floating.
        TypeError: For arguments of another type.
    """

    divided = "out_features"
    reduce_input_grad: bool = True
    """True if the gradient of an input that is whole is summed over the ranks.

    False if several layers share one prepared input: the sum is then made once, for all of them.
    """

    def cut(
        self,
        parts: Parts,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        self.gathered_dim: int | None = sequence_dim(input_layouts, "input_layouts")
        self.gather_output: bool = not features_split(output_layouts, "output_layouts")
        self.parts = parts
        for parameter in self.parameters():
            parts.cut(parameter, 0)

    def forward(self, x: Array) -> Array:
        """Map (..., in_features) to (..., out_features / size), or whole if gathered.

        Raises ValueError for another last dimension, TypeError for what is no array, or one whose
        dtype would make the output another than the parameters'.
        """
        check_input(x, self.weight, self.in_features, type(self).__qualname__)
        self.save_for_backward(x)
        group = self.parts.group
        if self.gathered_dim is not None:
            x = gather(x, group, self.gathered_dim)
        y = self.affine(x)
        return gather(y, group) if self.gather_output else y

    def backward(self, grad: Array) -> Array:
        group = self.parts.group
        if self.gather_output:
            grad = split(grad, group)
        x, dim = self.saved(), self.gathered_dim
        # The input is gathered while its gradient is computed, and that is summed while those of
        # the parameters are.
        gathered = None if dim is None else start_gather(x, group, dim)
        input_grad = grad @ self.weight.data
        summed = None
        if dim is not None or self.reduce_input_grad:
            summed = start_reduce(input_grad, group, dim)
        whole = x if gathered is None else gathered()
        self.defer(lambda: self.accumulate(whole, grad))
        return input_grad if summed is None else summed()


class RowParallelLinear(_ParallelLinear):
    """A Linear whose input features are split: each rank holds a block of columns of the weight.

    Args:
        in_features: The size of the last dimension of the input over all ranks; must divide by
            their number.
        out_features: The size of the last dimension of the output, whole on every rank.
        mesh: The ranks: ``mesh["tp"]``, a process group, or None for the default group.
        bias: Add a bias, whole on every rank and added once.
        input_layouts: None: the input is this rank's block, (..., in_features / size), such as a
            ``ColumnParallelLinear`` returns; ``Replicate()``: whole and the same on every rank.
        output_layouts: ``Replicate()``: the whole output on every rank, or ``Shard(1)``: this
            rank's part of the sequence, dim 1, whose length must divide by the number of ranks.
        rng: Draws the values of the whole layer; in the same state on all ranks.
        dtype: Of the parameters.

    Raises:
        ValueError: When in_features does not divide by the number of ranks, for sizes below 1, or
            a dtype that is not floating.
        TypeError: For arguments of another type.
    """

    divided = "in_features"

    def cut(
        self,
        parts: Parts,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        self.split_input: bool = not features_split(input_layouts, "input_layouts")
        self.scattered_dim: int | None = sequence_dim(output_layouts, "output_layouts")
        self.parts = parts
        parts.cut(self.weight, 1)
        if self.bias is not None:
            parts.cut(self.bias, None)

    def forward(self, x: Array) -> Array:
        """Map (..., in_features / size), or whole if not parallel, to (..., out_features).

        Raises ValueError for another last dimension, or a sequence that the ranks cannot share
        equally. Raises TypeError unless ``x`` is an array, or if its dtype would change the
        output's from that of the parameters.
        """
        name, group = type(self).__qualname__, self.parts.group
        if self.split_input:
            check_last(x, self.in_features * group.size(), name)
            x = split(x, group)
        check_input(x, self.weight, self.in_features, name)
        self.save_for_backward(x)
        y = reduce(x @ self.weight.data.T, group, self.scattered_dim)
        if self.bias is not None:
            y += self.bias.data
        return y

    def backward(self, grad: Array) -> Array:
        group = self.parts.group
        if self.scattered_dim is not None:
            grad = gather(grad, group, self.scattered_dim)
        input_grad = super().backward(grad)
        return gather(input_grad, group) if self.split_input else input_grad
