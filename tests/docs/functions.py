"""Writes c10d's functions, ``meshlib/_c10d/functions/``, from the methods of ``Collectives``.

``python tests/docs/functions.py`` writes them; with ``--check``, a part of ``make check``, it names
the files that differ and ends with 1. Editors run nothing: what they show must be in the source.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
METHODS = ROOT / "meshlib" / "_collectives"
FUNCTIONS = ROOT / "meshlib" / "_c10d" / "functions"
FILES = {
    "arrays": "on_arrays",
    "barriers": "collectives",
    "coalesced": "coalesced",
    "gather_single": "gather_single",
    "gathered": "gathered",
    "messages": "point_to_point",
    "objects": "on_objects",
    "personalized": "personalized",
}
"""For each file of functions, the file of methods that it is written from."""
NOTE = """
# A call without async_op matches the first two overloads of a function; the first one applies.
# pyright: reportOverlappingOverload=false
"""
AFTER_GROUP = ("async_op", "tag", "device", "group_src", "group_dst", "timeout")
"""``group`` stands before the first of these, as in c10d."""
GROUP_WORDS = "    group: A ProcessGroup or a DeviceMesh; None is the default group."


def written(name: str) -> str:
    """Return the text of one file of functions."""
    source = ast.parse((METHODS / f"{FILES[name]}.py").read_text())
    (cls,) = (
        node
        for node in source.body
        if isinstance(node, ast.ClassDef) and any(map(_is_public, node.body))
    )
    parts: list[str] = []
    first: dict[str, ast.FunctionDef] = {}  # a method's first overload has its types
    for node in cls.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts.append(ast.unparse(node))  # another name of the same call
        elif isinstance(node, ast.FunctionDef) and _is_public(node):
            if node.decorator_list:
                first.setdefault(node.name, node)
            else:
                parts.append(_function(node, first.get(node.name)))
    body = "\n".join(parts)
    head = (
        f'"""Written by tests/docs/functions.py from meshlib/_collectives/{FILES[name]}.py."""\n'
        f"{NOTE if any(first.values()) else ''}\n"
        "from __future__ import annotations\n"
    )
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    typevar = 'A = TypeVar("A")\n' if "A" in used else ""
    used |= {"TypeVar"} if typevar else set()
    imports = ["from meshlib._job.current import Group, resolve_group"]
    for node in source.body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if alias.name in used and isinstance(node, ast.ImportFrom):
                imports.append(f"from {node.module} import {alias.name}")
    text = "\n".join((head, *imports, typevar, body)) + "\n"
    path = str(FUNCTIONS / f"{name}.py")
    for command in (["check", "--select=I,RUF036", "--fix-only", "--quiet"], ["format", "--quiet"]):
        text = _ruff(*command, f"--stdin-filename={path}", "-", text=text)
    return text


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def _function(method: ast.FunctionDef, typed: ast.FunctionDef | None) -> str:
    """Return the function that calls ``method``, after its overloads if it is ``typed``."""
    words, result = ast.get_docstring(method), method.returns
    assert words is not None
    assert result is not None
    arguments = _with_group(method)
    names = [name for name, _, _ in arguments if name != "group"]
    place = [name for name, _, _ in arguments].index("group") + 1
    if place < len(arguments):
        following = f"    {arguments[place][0]}: "
        assert words.count(following) == 1
        words = words.replace(following, f"{GROUP_WORDS}\n{following}")
    call = f"resolve_group(group).{method.name}({', '.join(names)})"
    returns = "" if ast.unparse(result) == "None" else "return "
    text = "\n    ".join(f'"""{words}\n"""'.splitlines() if "\n" in words else [f'"""{words}"""'])
    return (
        f"{_overloads(typed) if typed is not None else ''}"
        f"def {method.name}({_listed(arguments)}) -> {ast.unparse(result)}:\n"
        f"    {text}\n    {returns}{call}\n"
    )


def _with_group(method: ast.FunctionDef) -> list[tuple[str, str, str | None]]:
    """Return the name, the type and the default of each argument of the function."""
    given = method.args.args[1:]
    defaults = [ast.unparse(default) for default in method.args.defaults]
    padded = [None] * (len(given) - len(defaults)) + defaults
    found = [
        (one.arg, ast.unparse(one.annotation), default)
        for one, default in zip(given, padded, strict=True)
        if one.annotation is not None
    ]
    place = next(i for i, (name, _, _) in enumerate(found) if name in AFTER_GROUP)
    default = "None" if "..." not in defaults else "..."
    return [*found[:place], ("group", "Group", default), *found[place:]]


def _overloads(typed: ast.FunctionDef) -> str:
    """Return the overloads: not asynchronous, so, and undecided."""
    arguments = _with_group(typed)
    assert typed.returns is not None
    result = ast.unparse(typed.returns)
    place = [name for name, _, _ in arguments].index("async_op")
    before, after = arguments[:place], arguments[place + 1 :]
    forms = (
        ([*before, ("async_op", "Literal[False]", "...")], result),
        ([*before, ("async_op", "Literal[True]", "...")], f"Work[{result}]"),
        ([*before, ("async_op", "bool", "...")], f"{result} | Work[{result}]"),
    )
    return "".join(
        f"@overload\ndef {typed.name}({_listed([*begin, *after])}) -> {returned}: ...\n"
        for begin, returned in forms
    )


def _listed(arguments: list[tuple[str, str, str | None]]) -> str:
    return ", ".join(
        f"{name}: {kind}" + (f" = {default}" if default is not None else "")
        for name, kind, default in arguments
    )


def _ruff(*arguments: str, text: str) -> str:
    ruff = str(Path(sysconfig.get_path("scripts")) / "ruff")
    command = [ruff, *arguments]
    ended = subprocess.run(
        command, input=text, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True, timeout=60
    )
    return ended.stdout


def stale() -> list[str]:
    """Return the files that are not what would be written."""
    texts = {name: FUNCTIONS / f"{name}.py" for name in FILES}
    return [
        str(path.relative_to(ROOT))
        for name, path in texts.items()
        if not path.exists() or path.read_text() != written(name)
    ]


def main(arguments: list[str]) -> int:
    """Write the files, or name those that differ."""
    if arguments == ["--check"]:
        found = stale()
        if found:
            print(f"write {', '.join(found)} anew: python tests/docs/functions.py")
        return 1 if found else 0
    for name in FILES:
        (FUNCTIONS / f"{name}.py").write_text(written(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
