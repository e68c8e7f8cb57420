"""Values nested in lists, tuples and dicts, as modules take and return them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

_T = TypeVar("_T")


def map_leaves(function: Callable[..., Any], value: Any, *others: Any, path: str = "") -> Any:
    """Return ``value`` with ``function(path, leaf, *leaves of others)`` for each leaf.

    A leaf is any object but a list, tuple or dict. ``others`` have the structure of ``value``, with
    any object in the place of a leaf. Paths are written as Python's subscripts, behind
    ``path``.

    Raises ValueError that names the place where another one is built differently.
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
        # A named tuple takes its entries one by one.
        return cast(Any, type(value))(*mapped) if hasattr(value, "_fields") else tuple(mapped)
    return function(path, value, *others)


def all_leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return (path, leaf) for each leaf, as ``map_leaves`` has them."""
    found: list[tuple[str, Any]] = []

    def note(path: str, leaf: Any) -> None:
        found.append((path, leaf))

    map_leaves(note, value, path=path)
    return found


def matches(path: str, pattern: str) -> bool:
    """True if ``pattern`` means ``path``: both are names with dots, ``*`` stands for one name."""
    ours, theirs = path.split("."), pattern.split(".")
    return len(ours) == len(theirs) and all(map(fnmatchcase, ours, theirs))


def meant_by(
    plan: Mapping[str, _T], paths: Mapping[str, Sequence[str]], lacking: str
) -> dict[str, _T]:
    """Return the entry of ``plan``, whose keys are patterns, for each of ``paths``.

    A path has names, itself among them, any of which a pattern may match. Raises ValueError for a
    pattern that matches none (it says ``lacking``, and the nearest ones), and for a path that two
    patterns mean.
    """
    found: dict[str, str] = {}
    for pattern in plan:
        own = [path for path, names in paths.items() if any(matches(n, pattern) for n in names)]
        if not own:
            known = sorted({name for names in paths.values() for name in names})
            near = difflib.get_close_matches(pattern, known, 3, 0.3)
            hint = f"; near are {', '.join(map(repr, near))}" if near else ""
            raise ValueError(f"plan names {pattern!r}, which {lacking}{hint}")
        for path in own:
            if path in found:
                raise ValueError(
                    f"plan means {path!r} by both {found[path]!r} and {pattern!r}; expected one"
                )
            found[path] = pattern
    return {path: plan[pattern] for path, pattern in found.items()}


def _differs(path: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{path or 'the value'}: expected {expected}, got {type(got).__name__}")
