"""What a user is told before a launch: what is allowed, and most likely not what was meant."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from importlib.machinery import PathFinder

from meshlib.launcher.options.launch import Program
from meshlib.neighbours import PACKAGES, is_ours

_WHAT_RANKS_THERE_ARE = (
    "--nproc-per-node",
    "--mesh",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-endpoint",
    "--rdzv-backend",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--replace",
    "--spares",
    "--standalone",
)
"""Options that few programs have, and without which a launch is another one."""


def stray_options(given: argparse.Namespace, default: Callable[[str], object]) -> list[str]:
    """Return a note for each option of meshrun among the program's own arguments.

    The program may have one of that name: nothing is said of those that meshrun got as well.
    """
    arguments: list[str] = given.arguments
    names = [word.partition("=")[0].replace("_", "-") for word in arguments]
    return [
        f"{name} stands after {given.program}, so the program gets it, not meshrun;"
        f" for meshrun: meshrun {name} ... {given.program}"
        for name in dict.fromkeys(names)
        if name in _WHAT_RANKS_THERE_ARE
        and getattr(given, dest := name[2:].replace("-", "_")) in (None, default(dest))
    ]


def hidden_packages(program: Program) -> list[str]:
    """Return a note for each package of ours that a file beside ``program`` hides from it."""
    if program.kind == "program":
        return []
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if not os.environ.get("PYTHONSAFEPATH"):
        script = os.path.realpath(program.target)
        beside = script if os.path.isdir(script) else os.path.dirname(script)
        path.insert(0, beside if program.kind == "script" else os.getcwd())
    notes: list[str] = []
    for name in PACKAGES:
        found = PathFinder.find_spec(name, path)
        if found is not None and found.origin is not None and not is_ours(name, found.origin):
            notes.append(
                f"{found.origin} hides meshlib's package {name!r} from the program: rename it, if"
                " the program or meshlib needs that one"
            )
    return notes
