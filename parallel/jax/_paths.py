"""Paths in a pytree, and patterns of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from parallel._nested import matches


def path_of(path: Any) -> str:
    """Return JAX's ``path`` to a node as in ``"blocks.0.weight"``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def leaves_below(tree: Any, patterns: Sequence[str], what: str) -> list[str]:
    """Return the paths of the leaves at or below the nodes that ``patterns`` mean.

    Raises ValueError, about ``what``, for a pattern that no node has.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_of(path) for path, _ in leaves]
    found: dict[str, None] = {}
    for pattern in patterns:
        names = pattern.count(".") + 1
        own = [path for path in paths if matches(".".join(path.split(".")[:names]), pattern)]
        if not own:
            raise ValueError(f"{what} has {pattern!r}, which no leaf is below; leaves are {paths}")
        found |= dict.fromkeys(own)
    return list(found)


def map_nodes(function: Callable[[str, Any], Any], tree: Any, patterns: Sequence[str]) -> Any:
    """Return ``tree`` with ``function(path, node)`` for the nodes that ``patterns`` mean."""

    def is_meant(path: Any, _: Any) -> bool:
        return any(matches(path_of(path), pattern) for pattern in patterns)

    def place(path: Any, node: Any) -> Any:
        return function(path_of(path), node) if is_meant(path, node) else node

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_meant, is_leaf_takes_path=True)
