"""The compiled part of calls, if it was built: see ``calls.h``.

It numbers and records common calls, and starts them in the engine of ``transport._native``. Python
code implements the same; a compiled class with a Python twin has the twin's type.
"""

from __future__ import annotations

from transport._native import core, load

calls = None if core is None else load("_calls", __name__)[0]
"""The compiled module, or None."""
