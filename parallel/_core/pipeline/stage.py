"""Stages, which are the parts of a model that ranks compute, and their shared parameters.

Stages exchange the shapes and dtypes of activations with the first microbatch. Shared parameters
start with equal values, and their gradients are summed. All copies get bitwise equal gradients, so
every optimizer makes the same update. Megatron-LM ties the input embedding to the output layer in
this way (Narayanan et al., arXiv:2104.04473, section 4.3).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshlib import ProcessGroup, Work
from meshlib.extend import Job, to_whole_number
from parallel._arrays import Array, is_floating, namespace, written
from parallel._checks import describe, to_count
from parallel._groups import GroupLike, gathered, resolve


class SharedParameter(Protocol):
    """One stage's copy of a parameter that several stages share."""

    grad: Array | None
    """The sum of the gradients since it was None, of the shape and dtype of ``data``."""

    @property
    def data(self) -> Array:
        """The parameter's values, which the optimizer updates."""
        ...

    @property
    def requires_grad(self) -> bool:
        """True if the parameter is trained."""
        ...


class _Holder(NamedTuple):
    stage: int
    rank: int
    described: str


class SharedParameters:
    """The shared parameters of this rank; ``own`` are (name, stage, parameter).

    The constructor is a collective. It raises ValueError on all ranks if stages have parameters of
    the same shared name but different shapes or dtypes.
    """

    def __init__(
        self, own: Sequence[tuple[str, int, SharedParameter]], group: ProcessGroup
    ) -> None:
        self._own: dict[str, list[SharedParameter]] = {}
        listed: list[tuple[str, _Holder]] = []
        for name, stage, parameter in sorted(own, key=lambda entry: entry[1]):
            copies = self._own.setdefault(name, [])
            if not any(parameter is other for other in copies):  # two stages may share the object
                copies.append(parameter)
                listed.append((name, _Holder(stage, group.rank(), _describe(parameter))))
        holders: dict[str, list[_Holder]] = {}
        for name, holder in itertools.chain.from_iterable(gathered(listed, group)):
            holders.setdefault(name, []).append(holder)
        for name, found in sorted(holders.items()):
            _check(name, sorted(found))
        self._groups: dict[str, ProcessGroup] = {}
        for name, copies in sorted(self._own.items()):
            ranks = [holder.rank for holder in sorted(holders[name])]
            self._copy_first(name, copies, ranks, group)
        self._before: dict[int, Array | None] = {}

    def _copy_first(
        self, name: str, copies: list[SharedParameter], ranks: list[int], group: ProcessGroup
    ) -> None:
        """Copy the first stage's values to all copies; ``ranks`` has each stage's rank."""
        value = copies[0].data
        if len(set(ranks)) > 1:
            members = [group.ranks[rank] for rank in dict.fromkeys(ranks)]
            self._groups[name] = Job().new_group(
                members,
                backend=group.backend,
                timeout=group.timeout,
                desc=f"stages that share {name!r}",
            )
            self._groups[name].broadcast(value, group_src=0)
        for parameter in copies[1:]:
            parameter.data[...] = value

    def begin(self) -> None:
        """Set aside the gradients of earlier steps, which are summed already."""
        for parameter in itertools.chain.from_iterable(self._own.values()):
            grad = parameter.grad
            self._before[id(parameter)] = None if grad is None else grad.copy()
            parameter.grad = None

    def finish(self) -> None:
        """Sum this step's gradients over the stages, and add those of earlier steps."""
        totals: dict[str, Array] = {}
        works: list[Work[Any]] = []
        for name, copies in sorted(self._own.items()):
            total = totals[name] = namespace(copies[0].data).zeros_like(copies[0].data)
            for parameter in copies:
                if parameter.grad is not None:
                    total += parameter.grad
            if name in self._groups:
                works.append(self._groups[name].all_reduce(total, async_op=True))
        for work in works:
            work.wait()
        for name, copies in self._own.items():
            for parameter in copies:
                before = self._before.pop(id(parameter), None)
                total = totals[name] if before is None else totals[name] + before
                if parameter.grad is None:
                    parameter.grad = total.copy()
                else:
                    parameter.grad[...] = total


def _check(name: str, holders: Sequence[_Holder]) -> None:
    if len({holder.described for holder in holders}) > 1:
        each = ", ".join(f"{holder.described} at stage {holder.stage}" for holder in holders)
        raise ValueError(f"shared parameter {name!r} differs between stages: {each}")


def _describe(parameter: SharedParameter) -> str:
    frozen = "" if parameter.requires_grad else " (frozen)"
    return f"{written(parameter.data)}{frozen}"


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
        """True if the array has a gradient, unlike integers and booleans."""
        return is_floating(self.dtype)


Specs = tuple[Spec, ...]


def specs_of(arrays: Sequence[Array]) -> Specs:
    """Return the shape and dtype of each of ``arrays``."""
    return tuple(Spec(tuple(array.shape), np.dtype(array.dtype)) for array in arrays)


def as_tuple(value: Any, what: str) -> tuple[Array, ...]:
    """Return one array, or a tuple or list of arrays, as a tuple.

    Raises TypeError, which names ``what``, for any other value.
    """
    arrays = tuple(value) if isinstance(value, tuple | list) else (value,)
    for array in arrays:
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise TypeError(f"{what} must be an array or a tuple of arrays, got {describe(array)}")
    return arrays


def check_like(arrays: Sequence[Array], expected: Specs, what: str) -> None:
    """Raise ValueError, which names ``what``, unless ``arrays`` have the ``expected`` specs."""
    got = specs_of(arrays)
    if got != expected:
        raise ValueError(f"{what} is {_listed(got)}; expected {_listed(expected)}")


def _listed(specs: Specs) -> str:
    return ", ".join(map(str, specs))


class Stage(ABC):
    """Stage ``stage_index`` of ``num_stages``, on this rank of ``mesh``.

    Inputs and outputs are tuples of arrays. The stage stores the data that a microbatch's backward
    needs from its forward, by the microbatch's number.
    """

    def __init__(self, stage_index: int, num_stages: int, mesh: GroupLike | None) -> None:
        self.num_stages: int = to_count(num_stages, "num_stages")
        self.stage_index: int = to_whole_number(stage_index, "stage_index")
        if not 0 <= self.stage_index < self.num_stages:
            raise ValueError(
                f"stage_index is {stage_index}; expected 0 to {self.num_stages - 1}, because"
                f" num_stages is {self.num_stages}"
            )
        self.group: ProcessGroup = resolve(mesh, "mesh")
        self.shared_parameters: Mapping[str, SharedParameter] = {}
        """The parameters that other stages have as well, by name."""

    @property
    def is_first(self) -> bool:
        """True if the stage's input is the batch."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True if the stage's output is the model's output."""
        return self.stage_index == self.num_stages - 1

    def __repr__(self) -> str:
        return f"stage {self.stage_index} of {self.num_stages}"

    @abstractmethod
    def empty(self, spec: Spec) -> Array:
        """Return an uninitialised array to receive an input or an output's gradient into."""

    @abstractmethod
    def joined(self, arrays: Sequence[Array]) -> Array:
        """Concatenate the microbatches' outputs along dim 0."""

    @abstractmethod
    def check_loss(self, function: Any) -> None:
        """Raise TypeError unless ``loss`` can call ``function``."""

    @abstractmethod
    def begin(self, training: bool) -> None:
        """Begin a step."""

    @abstractmethod
    def forward(
        self, microbatch: int, inputs: Sequence[Array], kwargs: dict[str, Any]
    ) -> tuple[Array, ...]:
        """Return the outputs; when training, store the data for backward."""

    @abstractmethod
    def loss(
        self, function: Any, outputs: Sequence[Array], target: Any, scale: float | None
    ) -> tuple[float, tuple[Array, ...]]:
        """Return the loss and the outputs' gradients times ``scale`` (None: no gradients)."""

    @abstractmethod
    def backward(
        self, microbatch: int, grads: Sequence[Array | None], *, last: bool
    ) -> tuple[Array | None, ...]:
        """Return the gradients of the inputs, and accumulate those of the parameters.

        ``last`` is True for the stage's last gradients of parameters in this step.
        """

    @abstractmethod
    def backward_input(
        self, microbatch: int, grads: Sequence[Array | None]
    ) -> tuple[Array | None, ...]:
        """Return the gradients of the inputs; defer those of parameters to ``backward_weight``."""

    @abstractmethod
    def backward_weight(self, microbatch: int, *, last: bool) -> None:
        """Accumulate the gradients of the parameters that ``backward_input`` deferred."""

    @abstractmethod
    def end(self, failed: bool) -> None:
        """End a step; drop the stored data of microbatches."""
