"""The place of a call inside ``jit`` in the user's program.

For each call, the flight recorder keeps the user's line that made it, and finds it on the stack.
But when XLA makes the call, the stack has JAX's frames, or none. The user's line is only known from
tracing, so ``CallSite`` puts it on the stack.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FunctionType
from typing import NamedTuple, TypeVar

import jax

from meshlib._recording.recorder import OWN_FOLDERS

_SKIPPED = (*OWN_FOLDERS, os.path.join(os.path.dirname(jax.__file__), ""))
_F = TypeVar("_F", bound=Callable[..., object])


class CallSite(NamedTuple):
    """A line of a source file."""

    filename: str
    line: int
    function: str

    @classmethod
    def of_caller(cls) -> CallSite:
        """Return the line of the nearest caller that is neither this project's nor JAX's."""
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame.f_code.co_filename.startswith(_SKIPPED) and frame.f_back is not None:
            frame = frame.f_back
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def name(self, function: _F) -> _F:
        """Return ``function``, which is written on one line, as if it were written here."""
        assert isinstance(function, FunctionType)
        code = function.__code__.replace(
            co_filename=self.filename, co_firstlineno=self.line, co_name=self.function
        )
        return FunctionType(  # type: ignore[return-value]
            code, function.__globals__, self.function, function.__defaults__, function.__closure__
        )
