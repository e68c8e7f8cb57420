"""Arithmetic without floating-point warnings, whatever the user set.

Overflow is an answer, and must not make one rank raise in the middle of a call that the others go
on with.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, Protocol, TypeVar

import numpy as np

from transport._operands.reduce_op import Flat

P = ParamSpec("P")
R = TypeVar("R")


def quiet(buffer: Flat) -> AbstractContextManager[object]:
    """Return a context for arithmetic on ``buffer``."""
    return nullcontext() if buffer.dtype.kind in "biu" else np.errstate(all="ignore")


class Run(Protocol):
    """Calls a function and returns what it returns."""

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``function(*args, **kwargs)``."""
        ...


def quiet_runner() -> Run:
    """Return what runs functions with the warnings off; it is for one thread at a time.

    From NumPy 2 on the setting is a context variable: to enter a context that has it costs a tenth
    of ``np.errstate``.
    """
    if int(np.__version__.partition(".")[0]) < 2:
        return _with_errstate
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run


def _with_errstate(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    with np.errstate(all="ignore"):
        return function(*args, **kwargs)
