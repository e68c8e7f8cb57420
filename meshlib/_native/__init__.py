"""The compiled part of calls, where there is one: see ``calls.h``.

It numbers and records usual calls, and begins them in the engine of ``transport._native``. What it
does Python does as well; a class with a twin in Python is typed as that one.
"""

from __future__ import annotations

from transport._native import core, load

calls = None if core is None else load("_calls", __name__)[0]
"""The module, or None."""
