"""Argument checks of this package, in addition to those of ``meshlib.extend``."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib.extend import to_whole_number
from parallel._arrays import is_floating


def describe(value: object) -> str:
    """Return ``value``, shortened, and its type, for the "got" part of an error message."""
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def to_count(value: Any, name: str, least: int = 1) -> int:
    """Return ``value`` as an int.

    Raises TypeError for a value that is not an integer, ValueError for one below ``least``.
    """
    count = to_whole_number(value, name)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return count


def check_number(value: Any, name: str) -> None:
    """Raise TypeError unless ``value`` is a real number or an array of shape ``()``."""
    try:
        if isinstance(value, str | bytes) or getattr(value, "shape", ()):
            raise TypeError
        float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {describe(value)}") from None


def check_nonnegative(**options: Any) -> None:
    """Raise TypeError or ValueError for the first of ``options`` that is not a number >= 0."""
    for name, value in options.items():
        check_number(value, name)
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def check_share(value: Any, name: str, *, whole: bool) -> None:
    """Raise TypeError or ValueError unless ``value`` is in [0, 1), or in [0, 1] if ``whole``."""
    check_number(value, name)
    if not (0 <= value < 1 or (whole and value == 1)):
        raise ValueError(f"{name} must be in [0, 1{']' if whole else ')'}, got {value}")


def check_instance(value: object, expected: type, name: str, example: str = "") -> None:
    """Raise TypeError unless ``value`` is an ``expected``; the message shows ``example``."""
    if not isinstance(value, expected):
        such_as = f", such as {example}" if example else ""
        kind = expected.__qualname__
        article = "an" if kind[0] in "AEIO" else "a"
        raise TypeError(f"{name} must be {article} {kind}{such_as}, got {describe(value)}")


def check_callable(value: object, name: str) -> None:
    """Raise TypeError unless ``value`` is callable."""
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {describe(value)}")


def check_array(value: object, name: str) -> None:
    """Raise TypeError unless ``value`` is an array of any library."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} must be an array, got {describe(value)}")


def to_generator(rng: np.random.Generator | None) -> np.random.Generator:
    """Return ``rng``; for None a new generator, seeded from NumPy's global random state.

    Raises TypeError for anything else.
    """
    if rng is None:
        return np.random.default_rng(np.random.randint(0, 2**32, 4, np.uint32))
    check_instance(rng, np.random.Generator, "rng", "numpy.random.default_rng(0)")
    return rng


def to_floating(dtype: npt.DTypeLike, name: str) -> np.dtype[Any]:
    """Return ``dtype`` as a NumPy dtype.

    Raises TypeError if it is not a dtype, ValueError if it is not a floating-point dtype.
    """
    try:
        result = np.dtype(dtype)
    except TypeError:
        raise TypeError(f"{name} must be a dtype, such as 'float32', got {dtype!r}") from None
    if not is_floating(result):
        raise ValueError(f"{name} must be floating, got {result.name}")
    return result


def check_state_dict(state: object, *keys: str, name: str = "state") -> None:
    """Raise TypeError unless ``state`` is a mapping, and KeyError if it lacks any of ``keys``."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be the result of state_dict(), got {describe(state)}")
    missing = [key for key in keys if key not in state]
    if missing:
        has = sorted(map(str, state))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        raise KeyError(f"{name} lacks {missing}, has {has}; expected the result of state_dict()")


def check_transformation(transformation: object) -> None:
    """Raise TypeError unless the value has the methods of an ``optax.GradientTransformation``."""
    if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
        raise TypeError(
            "transformation must be an optax.GradientTransformation, such as optax.adamw(1e-3), "
            f"got {describe(transformation)}"
        )
