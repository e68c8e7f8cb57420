"""True if each public name has a type that every checker reads alike: ``pyright --verifytypes``.

``python tests/docs/type_completeness.py``, a part of ``make check``, prints what has not, and ends
with 1 if there is any. Left out is what derives from a class of a library that is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

PACKAGES = ("meshlib", "parallel")
BASES = {"ray": ("meshlib.engines.ray",), "torch": ("meshlib.torch",)}
"""The modules whose classes derive from a library's."""


def incomplete(package: str) -> list[str]:
    """Return a line for each public name of ``package`` whose type is not wholly known."""
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | {"PATH": os.pathsep.join((scripts, os.environ["PATH"]))}
    command = ["pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
    with tempfile.TemporaryDirectory() as elsewhere:  # the project's own settings are not asked
        ended = subprocess.run(
            command, env=environment, cwd=elsewhere, capture_output=True, text=True, check=False
        )
    report: dict[str, Any] = json.loads(ended.stdout)["typeCompleteness"]
    if not report["symbols"]:
        return [f"pyright found no name in {package}: {ended.stdout[:500]}"]
    unknown = tuple(
        prefix
        for library, modules in BASES.items()
        if importlib.util.find_spec(library) is None
        for prefix in modules
    )
    return [
        f"{symbol['name']}: {diagnostic['message']}"
        for symbol in report["symbols"]
        if symbol["isExported"] and not symbol["name"].startswith(unknown)
        for diagnostic in symbol["diagnostics"]
        if diagnostic["severity"] == "error"
    ]


def main() -> int:
    """Check all packages that users import from."""
    found = [line for package in PACKAGES for line in incomplete(package)]
    print("\n".join(found) or f"the types of {' and '.join(PACKAGES)} are complete")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
