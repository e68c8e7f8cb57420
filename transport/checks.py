"""Checks of arguments that every floor makes."""

from __future__ import annotations

import operator
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
