"""Functions for a rank's part of an array (NumPy or CuPy), and for boxes of the global array."""

from __future__ import annotations

import sys
from importlib import import_module
from operator import index as to_int
from typing import Any

import numpy as np

from meshlib._arrays import adapter as arrays
from meshlib._arrays.adapted import AdaptedArray

Array = Any
"""``numpy.ndarray`` or ``cupy.ndarray``."""

Box = tuple[slice, ...]


def array_module(array: Array) -> Any:
    """Return the library of ``array``, NumPy or CuPy; None for anything else."""
    if isinstance(array, np.ndarray):
        return np
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else None


def module_for(device_type: str) -> Any:
    """Return the module whose arrays are made for a mesh of ``device_type``: NumPy or CuPy."""
    return np if device_type == "cpu" else import_module("cupy")


def dim_of(axis: Any, ndim: int) -> int:
    """Return ``axis``, which may count from the end, as a dim from 0; raise NumPy's AxisError."""
    number = to_int(axis)
    if not -ndim <= number < ndim:
        raise np.exceptions.AxisError(number, ndim)
    return number % ndim


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a part of an array."""
    return tuple(part.stop - part.start for part in box)


def intersection(a: Box, b: Box) -> Box | None:
    """Return the overlap of two parts of an array, or None."""
    both: list[slice] = []
    for x, y in zip(a, b, strict=True):
        low, high = max(x.start, y.start), min(x.stop, y.stop)
        if low >= high:
            return None
        both.append(slice(low, high))
    return tuple(both)


def relative(box: Box, within: Box) -> tuple[Any, ...]:
    """Return the index of the part ``box`` in an array that is the part ``within``."""
    inside = (
        slice(part.start - outer.start, part.stop - outer.start)
        for part, outer in zip(box, within, strict=True)
    )
    return (*inside, ...)  # the ellipsis keeps a 0-d array from becoming a scalar


def flat_target(array: Array) -> AdaptedArray:
    """Return an array as the flat buffer that a call writes to; ``finish()`` copies it back."""
    return arrays.target(array, "local")


def flat_source(array: Array) -> AdaptedArray:
    """Return an array as the flat buffer that a call reads: a copy unless it is C-contiguous."""
    return arrays.source(array, "local")


def neutral(op: str, array: Array) -> Array:
    """Return an array like ``array`` of the neutral elements of ``op``."""
    module = array_module(array)
    if op == "sum":
        zeros = module.zeros(array.shape, array.dtype)
        # The neutral float is -0.0: -0.0 + 0.0 is 0.0.
        return zeros if array.dtype.kind in "biu" else module.negative(zeros, out=zeros)
    if op == "product":
        return module.ones(array.shape, array.dtype)
    return array.copy()  # the average, minimum and maximum of equal values is the value


def as_array(value: Any) -> Array:
    """Return a result of NumPy as an array: NumPy returns scalars instead of 0-d arrays."""
    return np.asarray(value) if isinstance(value, (np.generic, bool, int, float)) else value
