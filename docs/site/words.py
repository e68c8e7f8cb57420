"""The reference says of c10d's functions what ``help()`` says: they get their words at import."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from griffe import Docstring, Extension, Function


class WordsOfMethods(Extension):
    """Takes the words of functions with ``worded_as_method`` from the functions themselves."""

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        """Give ``func`` the docstring that it has when it runs."""
        if any(one.callable_path.endswith(".worded_as_method") for one in func.decorators):
            value = getattr(importlib.import_module(func.module.path), func.name)
            func.docstring = Docstring(inspect.getdoc(value) or "", parent=func)
