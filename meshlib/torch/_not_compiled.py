"""Keeping ``torch.compile`` out of the calls of a process group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, into which ``torch.compile`` does not look.

    C++ calls a group in the middle of compiled programs, and Dynamo would trace all of meshlib.
    """

    # Importing Dynamo takes a second, and where nobody has imported it, nobody compiles.
    def call(*arguments: Any, **named: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **named)
        disabled = getattr(function, "disabled", None)
        if disabled is None:
            compiler: Any = import_module("torch.compiler")
            disabled = compiler.disable(function)
            setattr(function, "disabled", disabled)  # noqa: B010 (a function has none by its type)
        return disabled(*arguments, **named)

    return call
