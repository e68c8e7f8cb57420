"""The distribution's packages lie beside each other; a file of the same name may hide one of them.

Python looks beside the program first, and ``transport.py`` is a name that a program may well have.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

PACKAGES = ("meshlib", "transport", "parallel")


def is_ours(package: str, file: str) -> bool:
    """Return whether ``file``, where Python finds ``package``, is that of the distribution."""
    ours = os.path.join(os.path.dirname(os.path.dirname(__file__)), package, "__init__.py")
    return file == ours or os.path.realpath(file) == os.path.realpath(ours)


def check_transport() -> None:
    """Raise ImportError that names the file which Python finds in place of our ``transport``."""
    there = sys.modules.get("transport")
    spec = there.__spec__ if there is not None else find_spec("transport")
    file = spec.origin if spec is not None else getattr(there, "__file__", None)
    if file is not None and not is_ours("transport", file):
        raise ImportError(
            f"{file} is in the way of meshlib's package 'transport', which has the same name:"
            " rename that file, or start from another folder",
            name="transport",
            path=file,
        )
