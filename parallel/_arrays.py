"""The array library of an array. No other module of this package decides this.

Layers and optimizers are written against NumPy's interface. CuPy has the same one, so they run on
whatever library the parameters' arrays come from; nothing is imported that the user did not import.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of a supported library. Their types have no common base, hence ``Any``."""

Namespace: TypeAlias = Any
"""The module of an array library: ``numpy``, or ``cupy``."""

_LIBRARIES = ("numpy", "cupy")


def namespace(array: Array, name: str = "the array") -> Namespace:
    """Return the library (a module with NumPy's interface) that made ``array``.

    Raises TypeError for anything else; it names the argument ``name`` and the libraries that are
    understood.
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
    """True if ``dtype`` is one of real floating point numbers, those of ml_dtypes among them."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def _library(array: object) -> str | None:
    for cls in type(array).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _LIBRARIES:
            return root
    return None


def pieces(flat: Array, shapes: Iterable[Sequence[int]], begin: int = 0) -> list[Array]:
    """Return consecutive parts of the flat array, from element ``begin`` on, in these shapes."""
    found: list[Array] = []
    for shape in shapes:
        end = begin + math.prod(shape)
        found.append(flat[begin:end].reshape(shape))
        begin = end
    return found


def written(array: Array) -> str:
    """Return dtype and shape as messages have them: ``float32[2, 3]``."""
    return f"{array.dtype.name}{list(array.shape)}"


def placement(array: Array) -> tuple[str, str]:
    """Return (dtype name, device): arrays with equal ones can share a flat buffer."""
    return array.dtype.name, str(getattr(array, "device", "cpu"))
