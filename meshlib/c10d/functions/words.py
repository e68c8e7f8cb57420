"""The words of c10d's functions: those of the methods that they call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from meshlib.collectives.collectives import Collectives

F = TypeVar("F", bound=Callable[..., Any])

_OF_FUNCTIONS_ALONE = {
    "group": "    group: A ProcessGroup or a DeviceMesh; None is the default group.\n",
    "device_ids": "    device_ids: Accepted for c10d's sake.\n",
}
_ARGUMENTS = re.compile(r"^Args:\n((?: {4}.*\n)+)", re.MULTILINE)
_ARGUMENT = re.compile(r"^ {4}(\w+): .*\n(?: {8}.*\n)*", re.MULTILINE)


def worded_as_method(function: F) -> F:
    """Give a function the docstring of the method of its name, with the function's arguments.

    So ``help()`` has all of it at both. What is in the source is for editors, which do not run it.
    """
    text = inspect.getdoc(getattr(Collectives, function.__name__))
    found = None if text is None else _ARGUMENTS.search(text)
    if text is not None and found is not None:  # python -OO keeps no words
        entries = {entry[1]: entry[0] for entry in _ARGUMENT.finditer(found[1])}
        entries |= _OF_FUNCTIONS_ALONE
        arguments = "".join(entries[name] for name in inspect.signature(function).parameters)
        function.__doc__ = text[: found.start(1)] + arguments + text[found.end(1) :]
    return function
