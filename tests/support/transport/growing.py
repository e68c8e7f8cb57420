"""Deadlines that pass, and must not do so before all ranks but one have arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def with_growing_deadlines(attempt: Callable[[float], T | None]) -> T:
    """Return what ``attempt(seconds)`` returns; with more seconds, as long as that is None."""
    for seconds in (0.3, 3.0, 30.0):
        found = attempt(seconds)
        if found is not None:
            return found
    raise AssertionError("not even with 30 s")
