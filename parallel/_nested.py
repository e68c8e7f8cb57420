"""Nested lists, tuples and dicts, which modules accept and return."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

_T = TypeVar("_T")


def map_leaves(function: Callable[..., Any], value: Any, *others: Any, path: str = "") -> Any:
    """Return ``value`` with each leaf replaced by ``function(path, leaf, *leaves of others)``.

    A leaf is any object but a list, tuple or dict. ``others`` have the structure of ``value``, with
    any object in place of a leaf. A leaf's path is ``path`` followed by Python subscripts.

    Raises ValueError, which names the path, where one of ``others`` has another structure.
    """
    if isinstance(value, dict):
        entries = cast(dict[Any, Any], value)
        for other in others:
            if not isinstance(other, dict) or entries.keys() != cast(Any, other).keys():
                raise _differs(path, f"a dict with the keys {sorted(map(str, entries))}", other)
        return {
            key: map_leaves(
                function, entry, *(other[key] for other in others), path=f"{path}[{key!r}]"
            )
            for key, entry in entries.items()
        }
    if isinstance(value, list | tuple):
        parts = cast(Sequence[Any], value)
        for other in others:
            if not isinstance(other, list | tuple) or len(cast(Any, other)) != len(parts):
                raise _differs(path, f"a {type(value).__name__} of {len(parts)} entries", other)
        mapped = [
            map_leaves(function, *entries, path=f"{path}[{place}]")
            for place, entries in enumerate(zip(parts, *others, strict=True))
        ]
        if isinstance(value, list):
            return mapped
        # The constructor of a named tuple accepts separate arguments, not a sequence.
        return cast(Any, type(value))(*mapped) if hasattr(value, "_fields") else tuple(mapped)
    return function(path, value, *others)


def all_leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return (path, leaf) for each leaf, with the paths of ``map_leaves``."""
    found: list[tuple[str, Any]] = []

    def append(path: str, leaf: Any) -> None:
        found.append((path, leaf))

    map_leaves(append, value, path=path)
    return found


def matches(path: str, pattern: str) -> bool:
    """True if ``pattern`` matches the dotted ``path``; ``*`` matches within one name only."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def meant_by(
    plan: Mapping[str, _T], paths: Mapping[str, Sequence[str]], lacking: str
) -> dict[str, _T]:
    """Return the entry of ``plan``, whose keys are patterns, for each matching path of ``paths``.

    ``paths`` maps each path to its names, including itself; a pattern may match any of these
    names. Raises ValueError for a pattern that matches no name (the message contains ``lacking``
    and the closest names), and for a path that two patterns match.
    """
    found: dict[str, str] = {}
    for pattern in plan:
        own = [path for path, names in paths.items() if any(matches(n, pattern) for n in names)]
        if not own:
            known = sorted({name for names in paths.values() for name in names})
            near = difflib.get_close_matches(pattern, known, 3, 0.3)
            hint = f"; similar names: {', '.join(map(repr, near))}" if near else ""
            raise ValueError(f"plan names {pattern!r}, which {lacking}{hint}")
        for path in own:
            if path in found:
                raise ValueError(
                    f"both {found[path]!r} and {pattern!r} of plan match {path!r}; expected one"
                )
            found[path] = pattern
    return {path: plan[pattern] for path, pattern in found.items()}


def _differs(path: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{path or 'the value'}: expected {expected}, got {type(got).__name__}")
