"""The styles in a plan of ``parallelize``, each of which splits one module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import cast

from parallel.nn._layers.linear import Embedding, Linear
from parallel.nn._module import Module
from parallel.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
from parallel.tensor_parallel._parts import Parts, Placement, features_split, sequence_dim
from parallel.tensor_parallel._vocab import VocabParallelEmbedding


class ParallelStyle(ABC):
    """A way to split one module over the ranks."""

    @abstractmethod
    def check(self, module: Module, path: str, parts: Parts) -> None:
        """Raise if the ``module`` at ``path`` cannot be split over the ranks of ``parts``.

        Raises TypeError for a module of another type, ValueError for sizes that are not divisible
        by the number of ranks. Changes and sends nothing.
        """

    @abstractmethod
    def apply(self, module: Module, parts: Parts, prepared: bool) -> None:
        """Split ``module``, which has passed ``check``.

        ``prepared`` is True if the plan prepares the input of a module that contains it.
        """


@dataclass(frozen=True)
class ColwiseParallel(ParallelStyle):
    """Split the output features and the bias of a ``Linear``: rank i has the i-th block.

    Args:
        input_layouts: ``Replicate()``: the whole input on every rank. ``Shard(1)``: this rank's
            part of the sequence, dim 1. None: a ``PrepareModuleInput`` of the same plan, for a
            module that contains this one, makes the input whole and sums its gradient; without
            one, the same as ``Replicate()``.
        output_layouts: None: split features (torch's ``Shard(-1)``). ``Replicate()``: the whole
            output on every rank.

    Raises TypeError for other layouts.
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None

    def __post_init__(self) -> None:
        sequence_dim(self.input_layouts, "input_layouts")
        features_split(self.output_layouts, "output_layouts")

    def check(self, module: Module, path: str, parts: Parts) -> None:
        if type(module) is not Linear:
            raise wrong_type(self, module, path, "an nn.Linear")
        for parameter in module.parameters():
            parts.check(parameter, 0, module.out_features, f"out_features of {path!r}")

    def apply(self, module: Module, parts: Parts, prepared: bool) -> None:
        """Make ``module`` a ``ColumnParallelLinear`` with this rank's part.

        ``prepared`` is True if a containing module sums the gradient of the input.
        """
        module.__class__ = ColumnParallelLinear
        layer = cast(ColumnParallelLinear, module)
        layer.cut(parts, self.input_layouts, self.output_layouts)
        layer.reduce_input_grad = self.input_layouts is not None or not prepared


@dataclass(frozen=True)
class RowwiseParallel(ParallelStyle):
    """Split the input features of a ``Linear``, or the rows of an ``Embedding``.

    The bias of a ``Linear`` is whole on every rank, and added after the sum.

    Args:
        input_layouts: None: split features (torch's ``Shard(-1)``), like the output of
            ``ColwiseParallel``. ``Replicate()``: the whole input on every rank. The indices of an
            embedding are always whole.
        output_layouts: ``Replicate()`` or None: the whole output on every rank. ``Shard(1)``: this
            rank's part of the sequence, dim 1.

    Raises TypeError for other layouts.
    """

    input_layouts: Placement | None = None
    output_layouts: Placement | None = None

    def __post_init__(self) -> None:
        features_split(self.input_layouts, "input_layouts")
        sequence_dim(self.output_layouts, "output_layouts")

    def check(self, module: Module, path: str, parts: Parts) -> None:
        if type(module) is Embedding:
            parts.check(module.weight, 0, module.num_embeddings, f"num_embeddings of {path!r}")
        elif type(module) is Linear:
            parts.check(module.weight, 1, module.in_features, f"in_features of {path!r}")
        else:
            raise wrong_type(self, module, path, "an nn.Linear or an nn.Embedding")

    def apply(self, module: Module, parts: Parts, prepared: bool) -> None:
        del prepared
        if isinstance(module, Embedding):
            module.__class__ = VocabParallelEmbedding
            table = cast(VocabParallelEmbedding, module)
            table.cut(parts, self.output_layouts)
        else:
            module.__class__ = RowParallelLinear
            layer = cast(RowParallelLinear, module)
            layer.cut(parts, self.input_layouts, self.output_layouts)


@dataclass(frozen=True)
class SequenceParallel(ParallelStyle):
    """Compute with this rank's part of each sequence, in norms and other position-wise modules.

    Input and output are parts of the sequence. Parameters remain whole, and their gradients are
    summed over the ranks: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
    """

    def check(self, module: Module, path: str, parts: Parts) -> None:
        for name, parameter in module.named_parameters(path):
            parts.check(parameter, None, 0, repr(name))
            if parameter.on_contribution is not None:
                raise ValueError(f"{name!r} is sequence parallel already")

    def apply(self, module: Module, parts: Parts, prepared: bool) -> None:
        del prepared
        for parameter in module.parameters():
            parts.cut(parameter, None)
            if parts.group.size() > 1:
                parameter.on_contribution = parts.sum


def wrong_type(style: ParallelStyle, module: Module, path: str, expected: str) -> TypeError:
    """Return the error for a ``module`` at ``path`` that ``style`` cannot split."""
    return TypeError(
        f"{type(style).__name__} splits {expected}; {path!r} is of type {type(module).__name__}"
    )
