"""Arithmetic without floating-point warnings, whatever the user set.

Overflow is an answer, and must not make one rank raise in the middle of a call that the others go
on with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def quietly(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with NumPy's floating-point warnings off while it runs."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run
