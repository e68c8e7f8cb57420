"""Linear layers whose weight is split over ``mesh["tp"]``, which ``parallelize`` makes.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3. A column-parallel layer, an element-wise
activation and a row-parallel layer cost two all-reduces: one forward (in the second layer) and one
backward (in the first). If the activations around them are split along the sequence, each
all-reduce becomes a reduce-scatter, and the opposite pass has an all-gather: Korthikanti et al.,
arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from parallel._arrays import Array
from parallel.nn._layers.linear import Linear, check_input, check_last
from parallel.tensor_parallel._parts import (
    Parts,
    Placement,
    features_split,
    gather,
    reduce,
    sequence_dim,
    split,
    start_gather,
    start_reduce,
)


class ColumnParallelLinear(Linear):
    """A Linear whose output features are split: rank i computes the i-th block of columns of y."""

    parts: Parts
    gathered_dim: int | None
    """The dim along which the input is split over the ranks; None: the input is whole."""
    gather_output: bool
    reduce_input_grad: bool
    """True if this layer sums the gradient of a whole input over the ranks.

    False if several layers share one prepared input, whose gradient is then summed only once.
    """

    def cut(
        self, parts: Parts, input_layouts: Placement | None, output_layouts: Placement | None
    ) -> None:
        """Reduce a whole layer to this rank's part; see ``ColwiseParallel``."""
        self.gathered_dim = sequence_dim(input_layouts, "input_layouts")
        self.gather_output = not features_split(output_layouts, "output_layouts")
        self.reduce_input_grad = True
        self.parts = parts
        for parameter in self.parameters():
            parts.cut(parameter, 0)

    def forward(self, x: Array) -> Array:
        """Map (..., in_features) to (..., out_features / size), or to all features if gathered.

        Raises ValueError for another last dimension. Raises TypeError unless ``x`` is an array, or
        if its dtype would change the output's from that of the parameters.
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
        # Overlaps the gather of the input with the computation of its gradient, and the sum of
        # this gradient with the computation of the parameters' gradients.
        gathered = None if dim is None else start_gather(x, group, dim)
        input_grad = grad @ self.weight.data
        summed = None
        if dim is not None or self.reduce_input_grad:
            summed = start_reduce(input_grad, group, dim)
        whole = x if gathered is None else gathered()
        self.defer(lambda: self.accumulate(whole, grad))
        return input_grad if summed is None else summed()


class RowParallelLinear(Linear):
    """A Linear whose input features are split: each rank holds a block of columns of the weight.

    The bias is whole on every rank, and added after the sum.
    """

    parts: Parts
    split_input: bool
    scattered_dim: int | None
    """The dim along which the output is split over the ranks; None: the output is whole."""

    def cut(
        self, parts: Parts, input_layouts: Placement | None, output_layouts: Placement | None
    ) -> None:
        """Reduce a whole layer to this rank's part; see ``RowwiseParallel``."""
        self.split_input = not features_split(input_layouts, "input_layouts")
        self.scattered_dim = sequence_dim(output_layouts, "output_layouts")
        self.parts = parts
        parts.cut(self.weight, 1)
        if self.bias is not None:
            parts.cut(self.bias, None)

    def forward(self, x: Array) -> Array:
        """Map (..., in_features / size) to (..., out_features); a whole input has all in_features.

        Raises ValueError for another last dimension, or a sequence length that is not divisible by
        the number of ranks. Raises TypeError unless ``x`` is an array, or if its dtype would change
        the output's from that of the parameters.
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
