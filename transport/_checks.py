"""Checks of arguments, for all packages."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def to_whole_number(value: Any, name: str) -> int:
    """Return ``value`` as an int; raise TypeError naming ``name`` if it is not an integer.

    Python's and NumPy's integers are accepted. Floats and strings are refused, not converted:
    they are usually mistakes.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number, got {value!r} of type {type(value).__name__}"
        ) from None


def to_whole_numbers(values: Any, name: str) -> list[int]:
    """Return ``values`` as ints; raise TypeError naming ``name`` and the index.

    A string is refused: it would be read as a list of its characters.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a list of whole numbers, got {values!r} of type"
            f" {type(values).__name__}"
        )
    listed: list[Any] = list(values)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if set(map(type, listed)) <= {int}:  # the usual case; a group may have thousands
        return listed
    return [to_whole_number(value, f"{name}[{i}]") for i, value in enumerate(listed)]
