"""Warnings about discarded results of calls on read-only arrays.

``dist.all_reduce(gradient)`` updates a NumPy array. With a JAX array it has no effect unless the
program uses the returned array. Each line that discards it gets one warning.
"""

from __future__ import annotations

import dis
import os
import sys
import warnings
import weakref
from functools import lru_cache
from types import CodeType

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OWN_FOLDERS = tuple(
    os.path.join(_ROOT, folder, "")
    for folder in (
        "meshlib/_arrays",
        "meshlib/_calls",
        "meshlib/_collectives",
        "meshlib/_c10d/functions",
    )
)
_getframe = sys._getframe  # pyright: ignore[reportPrivateUsage]


class ResultIgnoredWarning(UserWarning):
    """A warning about the discarded result of a call on a read-only array.

    The call had no effect on this rank: write ``x = all_reduce(x)``, or use ``work.result()``.
    """


def warn_if_discarded() -> None:
    """Warn if the user's line discards the result of the collective that it calls.

    For calls that change no array in place. The result is discarded if the next bytecode
    instruction of the line drops it.
    """
    frame = _getframe(1)
    while frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        if frame.f_back is None:
            return
        frame = frame.f_back
    code = frame.f_code
    if _drops_result(code, frame.f_lasti):
        warnings.warn_explicit(
            "the result of this call is lost: its array cannot be written to (JAX), so the call"
            " returns a new one. Write x = all_reduce(x), and likewise for other calls",
            ResultIgnoredWarning,
            code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__"),
            frame.f_globals.setdefault("__warningregistry__", {}),
        )


@lru_cache(maxsize=1024)
def _drops_result(code: CodeType, instruction: int) -> bool:
    """Return whether the instruction after ``instruction`` drops the value of its call."""
    later = (each for each in dis.get_instructions(code) if each.offset > instruction)
    return next(later).opname == "POP_TOP"


class UntakenResult:
    """A warning that is issued if ``owner``, a ``Work``, is collected before ``take`` is called.

    ``what`` names the call and its line in the program.
    """

    def __init__(self, owner: object, what: str) -> None:
        self._end = weakref.finalize(owner, _warn_of, what)
        self._end.atexit = False

    def take(self) -> None:
        """Cancel the warning: the program has read the result."""
        self._end.detach()


def _warn_of(what: str) -> None:
    warnings.warn(
        f"the result of {what} is lost: its array cannot be written to (JAX), so only work.result()"
        " has it, which the program has not called",
        ResultIgnoredWarning,
        stacklevel=1,
    )
