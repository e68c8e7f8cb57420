"""The user's line that a call inside ``jit`` comes from.

The flight recorder finds the user's line of each call on the stack. But when XLA makes a call, the
stack has only JAX's frames, or none. ``CallSite`` remembers the line from tracing, and puts it on
the stack.
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
        """Return a copy of ``function``, which has one line, that runs under this line's name."""
        assert isinstance(function, FunctionType)
        code = function.__code__.replace(
            co_filename=self.filename, co_firstlineno=self.line, co_name=self.function
        )
        return FunctionType(  # type: ignore[return-value]
            code, function.__globals__, self.function, function.__defaults__, function.__closure__
        )
