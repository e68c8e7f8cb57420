"""What goes from one stage to the next: shapes and dtypes, agreed on with the first microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from parallel.arrays import Array, is_floating
from parallel.checks import describe


class Spec(NamedTuple):
    """The shape and dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

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
