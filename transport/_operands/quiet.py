"""Arithmetic without floating-point warnings or errors, whatever ``np.errstate`` the user has set.

Overflow is a valid result. It must not make one rank raise in a call that other ranks continue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def quietly(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with NumPy's floating-point warnings disabled while it runs."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return run
