"""Checks of arguments that every floor makes."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def to_whole_number(value: Any, name: str) -> int:
    """Return ``value`` as an int; raise TypeError naming ``name`` for what only looks like one.

    Python's and NumPy's integers will do. Floats and strings are not rounded or read: who passes
    them means something else.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number, got {value!r} of type {type(value).__name__}"
        ) from None


def to_whole_numbers(values: Any, name: str) -> list[int]:
    """Return ``values`` as ints; raise TypeError naming ``name``, and the place in it.

    A string is none: each of its characters would be taken for one.
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
