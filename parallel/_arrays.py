"""Helpers that are independent of the array library.

Layers and optimizers use NumPy's interface, which CuPy shares: they run on the library of the
parameters' arrays. This module imports neither library.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of a supported library. The array types have no common base, hence ``Any``."""

Namespace: TypeAlias = Any
"""The module of an array library: ``numpy``, or ``cupy``."""

_LIBRARIES = ("numpy", "cupy")


def namespace(array: Array, name: str = "the array") -> Namespace:
    """Return the library (a module with NumPy's interface) that made ``array``.

    Raises TypeError for any other object; the message calls it ``name`` and lists the supported
    libraries.
    """
    library = _library(array)
    if library is None:
        raise TypeError(
            f"{name} must be an array of one of {', '.join(_LIBRARIES)}, got "
            f"{reprlib.repr(array)} of type {type(array).__name__}"
        )
    return sys.modules[library]


def is_array(value: object) -> bool:
    """True if ``value`` is an array of a supported library."""
    return _library(value) is not None and hasattr(value, "dtype")


def is_floating(dtype: Any) -> bool:
    """True if ``dtype`` is a real floating-point dtype, including those of ml_dtypes."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def _library(array: object) -> str | None:
    for cls in type(array).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _LIBRARIES:
            return root
    return None


def pieces(flat: Array, shapes: Iterable[Sequence[int]], begin: int = 0) -> list[Array]:
    """Return consecutive views of a flat array in these shapes, starting at element ``begin``."""
    found: list[Array] = []
    for shape in shapes:
        end = begin + math.prod(shape)
        found.append(flat[begin:end].reshape(shape))
        begin = end
    return found


def written(array: Array) -> str:
    """Return dtype and shape in the format of messages: ``float32[2, 3]``."""
    return f"{array.dtype.name}{list(array.shape)}"


def placement(array: Array) -> tuple[str, str]:
    """Return (dtype name, device). Arrays with equal placement can share a flat buffer."""
    return array.dtype.name, str(getattr(array, "device", "cpu"))
