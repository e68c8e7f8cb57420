"""Excluding the calls of a process group from ``torch.compile``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of ``function`` that ``torch.compile`` does not trace.

    C++ calls groups inside compiled programs, and Dynamo would trace all of meshlib.
    """

    # Without Dynamo, whose import is slow, nothing is being compiled.
    def call(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        disabled = getattr(function, "disabled", None)
        if disabled is None:
            compiler: Any = import_module("torch.compiler")
            disabled = compiler.disable(function)
            setattr(function, "disabled", disabled)  # noqa: B010 (untyped)
        return disabled(*arguments, **named)

    return call
