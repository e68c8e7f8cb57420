"""Copies the words of each collective's method to the function of the same name.

``help(dist.all_reduce)`` and an editor that only reads sources both show a function's own
docstring, so it must stand there. It is written once, at the method; what a function has besides
(``group``) is written here.

    python tests/docs/shared_docstrings.py    # after a change of a method's words or arguments
"""

import ast
import inspect
import re
from pathlib import Path

from meshlib.collectives.collectives import Collectives

ROOT = Path(__file__).parents[2]
FUNCTIONS = ROOT / "meshlib" / "c10d" / "functions"
OF_FUNCTIONS_ALONE = {
    "group": ["    group: A ProcessGroup or a DeviceMesh; None is the default group."],
    "device_ids": ["    device_ids: Accepted for c10d's sake."],
}


def words_for(function: ast.FunctionDef) -> str:
    """Return the docstring of the method called like ``function``, with the function's Args."""
    method = inspect.getdoc(getattr(Collectives, function.name))
    assert method is not None, f"Collectives.{function.name} has no docstring"
    found = re.search(r"^Args:\n((?: {4}.*\n)+)\n", method, re.MULTILINE)
    assert found, f"Collectives.{function.name} has no Args"
    entries = dict(OF_FUNCTIONS_ALONE)
    for line in found[1].splitlines():
        if start := re.match(r" {4}(\w+): ", line):
            entries[start[1]] = (entry := [])
        entry.append(line)
    lines = [line for argument in function.args.args for line in entries[argument.arg]]
    return method[: found.start(1)] + "\n".join(lines) + "\n" + method[found.end(1) :]


def with_shared_words(source: str) -> str:
    """Return the ``source`` of a module of functions with the docstrings that they should have."""
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and hasattr(Collectives, node.name):
            if node.decorator_list:  # an overload, which has no words
                continue
            old = node.body[0]
            text = [f"    {line}".rstrip() for line in words_for(node).splitlines()]
            text[0] = f'    """{text[0].strip()}'
            lines[old.lineno - 1 : old.end_lineno] = [*text, '    """']
    return "\n".join(lines) + "\n"


def modules() -> list[Path]:
    """Return the modules of ``meshlib.c10d.functions`` that hold functions."""
    found = sorted(path for path in FUNCTIONS.glob("*.py") if "\ndef " in path.read_text())
    assert found, f"{FUNCTIONS} has no functions"
    return found


if __name__ == "__main__":
    for path in modules():
        before = path.read_text()
        if (after := with_shared_words(before)) != before:
            path.write_text(after)
            print(f"copied the words of methods to {path.relative_to(ROOT)}")
