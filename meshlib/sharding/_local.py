"""One rank's part of an array: NumPy's or CuPy's, and boxes of the global array within it."""

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
    """Return NumPy or CuPy, whichever ``array`` is of; None for anything else."""
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
    return (*inside, ...)  # without which an array without dims would give a scalar


def flat_target(array: Array) -> AdaptedArray:
    """Return an array as the flat buffer that a call writes to; ``finish()`` ends with it there."""
    return arrays.target(array, "local")


def flat_source(array: Array) -> AdaptedArray:
    """Return an array as the flat buffer that a call reads: a copy unless it is C-contiguous."""
    return arrays.source(array, "local")


def neutral(op: str, array: Array) -> Array:
    """Return an array like ``array`` of the neutral elements of ``op``."""
    module = array_module(array)
    if op == "sum":
        zeros = module.zeros(array.shape, array.dtype)
        # Of floats -0.0 is neutral: -0.0 + 0.0 is 0.0.
        return zeros if array.dtype.kind in "biu" else module.negative(zeros, out=zeros)
    if op == "product":
        return module.ones(array.shape, array.dtype)
    return array.copy()  # of equal values average, least and greatest are that value


def as_array(value: Any) -> Array:
    """Return a result of NumPy, which gives scalars for arrays without dims, as an array."""
    return np.asarray(value) if isinstance(value, (np.generic, bool, int, float)) else value
