"""A stage: the part of a model that one rank computes. What the executor asks of one.

What goes from one stage to the next has shapes and dtypes that are agreed on with the first
microbatch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshlib import ProcessGroup
from meshlib.extend import to_whole_number
from parallel._arrays import Array, is_floating, written
from parallel._checks import describe, to_count
from parallel._core.pipeline.shared import SharedParameter
from parallel._groups import Ranks, resolve


class Spec(NamedTuple):
    """The shape and dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return written(self)

    @property
    def nbytes(self) -> int:
        """The array's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_trained(self) -> bool:
        """Whether it has a gradient: integers and booleans have none."""
        return is_floating(self.dtype)


Specs = tuple[Spec, ...]


def specs_of(arrays: Sequence[Array]) -> Specs:
    """Return the shape and dtype of each of ``arrays``."""
    return tuple(Spec(tuple(array.shape), np.dtype(array.dtype)) for array in arrays)


def as_tuple(value: Any, what: str) -> tuple[Array, ...]:
    """Return the arrays that a stage passes on: one, or a tuple or list of them.

    Raises TypeError, which names ``what``, for anything else.
    """
    arrays = tuple(value) if isinstance(value, tuple | list) else (value,)
    for array in arrays:
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"{what} must be an array or a tuple of arrays, got {describe(array)}")
    return arrays


def check_like(arrays: Sequence[Array], expected: Specs, what: str) -> None:
    """Raise ValueError, which names ``what``, unless ``arrays`` are as ``expected``."""
    got = specs_of(arrays)
    if got != expected:
        raise ValueError(f"{what} is {_listed(got)}; expected {_listed(expected)}")


def _listed(specs: Specs) -> str:
    return ", ".join(map(str, specs))


class Stage(ABC):
    """Stage ``stage_index`` of ``num_stages``, on this rank of ``mesh``.

    Arrays go in and come out as tuples. Whatever backward needs of a microbatch's forward the stage
    keeps, under the microbatch's number.
    """

    def __init__(self, stage_index: int, num_stages: int, mesh: Ranks | None) -> None:
        self.num_stages: int = to_count(num_stages, "num_stages")
        self.stage_index: int = to_whole_number(stage_index, "stage_index")
        if not 0 <= self.stage_index < self.num_stages:
            raise ValueError(
                f"stage_index is {stage_index}; expected 0 to {self.num_stages - 1}, as num_stages"
                f" is {self.num_stages}"
            )
        self.group: ProcessGroup = resolve(mesh, "mesh")
        self.shared_parameters: Mapping[str, SharedParameter] = {}
        """By name, the parameters that other stages have as well."""

    @property
    def is_first(self) -> bool:
        """Whether it takes the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether its output is the model's."""
        return self.stage_index == self.num_stages - 1

    def __repr__(self) -> str:
        return f"stage {self.stage_index} of {self.num_stages}"

    @abstractmethod
    def empty(self, spec: Spec) -> Array:
        """Return an array into which the input, or the output's gradient, can be received."""

    @abstractmethod
    def joined(self, arrays: Sequence[Array]) -> Array:
        """Return the microbatches' outputs as one array, along dim 0."""

    @abstractmethod
    def check_loss(self, function: Any) -> None:
        """Raise TypeError for what ``loss`` cannot call."""

    @abstractmethod
    def begin(self, training: bool) -> None:
        """Begin a step."""

    @abstractmethod
    def forward(
        self, microbatch: int, inputs: Sequence[Array], kwargs: dict[str, Any]
    ) -> tuple[Array, ...]:
        """Return the outputs; when training, keep what backward needs."""

    @abstractmethod
    def loss(
        self, function: Any, outputs: Sequence[Array], target: Any, scale: float | None
    ) -> tuple[float, tuple[Array, ...]]:
        """Return the loss, and the gradient of the outputs times ``scale`` (None: no gradient)."""

    @abstractmethod
    def backward(
        self, microbatch: int, grads: Sequence[Array | None], *, last: bool
    ) -> tuple[Array | None, ...]:
        """Return the gradients of the inputs, and accumulate those of the parameters.

        ``last``: no other gradients of parameters come in this step.
        """

    @abstractmethod
    def backward_input(
        self, microbatch: int, grads: Sequence[Array | None]
    ) -> tuple[Array | None, ...]:
        """Return the gradients of the inputs; leave those of parameters to ``backward_weight``."""

    @abstractmethod
    def backward_weight(self, microbatch: int, *, last: bool) -> None:
        """Accumulate the gradients of the parameters that ``backward_input`` left."""

    @abstractmethod
    def end(self, failed: bool) -> None:
        """End a step, and forget what it has left if it failed."""
