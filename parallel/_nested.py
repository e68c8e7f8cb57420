"""Values nested in lists, tuples and dicts, as modules take and return them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast


def map_leaves(function: Callable[..., Any], value: Any, *others: Any, path: str = "") -> Any:
    """Return ``value`` with ``function(path, leaf, *leaves of others)`` for each leaf.

    A leaf is what is no list, tuple or dict. ``others`` have the structure of ``value``; what they
    have in the place of a leaf may be anything. Paths are written as Python's subscripts, behind
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
    """Whether ``pattern`` means ``path``: both are names with dots, ``*`` stands for one name."""
    ours, theirs = path.split("."), pattern.split(".")
    return len(ours) == len(theirs) and all(map(fnmatchcase, ours, theirs))


def _differs(path: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{path or 'the value'}: expected {expected}, got {type(got).__name__}")
