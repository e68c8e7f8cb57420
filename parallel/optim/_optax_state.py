"""Taking optax's states apart by parameter, and putting them together again.

An optax state is a pytree in which copies of the parameters' tree appear: moments, for example. For
a tree that is a dict with names that occur nowhere else, the leaves below a name belong to that
parameter; all others (a step count) are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from parallel._checks import describe

PATH_OF_LEAF = "{leaf}"

PerLeaf = dict[str, dict[str, Any]]
"""Name of a parameter → path in the state, with ``PATH_OF_LEAF`` in the name's place → array."""

Shared = dict[str, Any]
"""Path in the state → array."""


def check_transformation(transformation: object) -> None:
    """Raise TypeError for what is no ``optax.GradientTransformation``, or like one."""
    if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
        raise TypeError(
            "transformation must be an optax.GradientTransformation, such as optax.adamw(1e-3), "
            f"got {describe(transformation)}"
        )


def take_apart(state: Any, names: Collection[str]) -> tuple[PerLeaf, Shared]:
    """Return the leaves of ``state``: those that belong to each of ``names``, and the others."""
    import jax

    per_leaf: PerLeaf = {name: {} for name in names}
    shared: Shared = {}
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        name, text = generic(path, names)
        (shared if name is None else per_leaf[name])[text] = value
    return per_leaf, shared


def put_together(
    template: Any, per_leaf: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]
) -> Any:
    """Return a state of the structure of ``template`` with the leaves of ``take_apart``.

    Raises KeyError, naming the first leaf of the template that is missing.
    """
    names = set(per_leaf)

    def find(path: tuple[Any, ...]) -> Any:
        name, text = generic(path, names)
        source = shared if name is None else per_leaf[name]
        if text not in source:
            whose = "the state" if name is None else f"the state of {name}"
            raise KeyError(f"{whose} lacks {text}; it has {sorted(source)}")
        return source[text]

    return map_by_path(template, find)


def same_shared(parts: Mapping[int, Mapping[str, Any]]) -> Shared:
    """Return what is shared, of which each rank (the keys of ``parts``) has a copy.

    Raises ValueError, naming the first leaf and the ranks, where the copies differ.
    """
    (first, reference), *others = parts.items()
    for rank, part in others:
        for path, value in reference.items():
            if path in part and not np.array_equal(np.asarray(value), np.asarray(part[path])):
                raise ValueError(
                    f"the optimizer's {path} is {value} on rank {first} and {part[path]} on rank "
                    f"{rank}, which own different parameters: the transformation looks at several "
                    "parameters at once, so its state cannot be sharded"
                )
    return dict(reference)


def map_by_path(template: Any, find: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Return the tree of the structure of ``template`` with ``find(path)`` as leaves."""
    import jax

    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    return jax.tree_util.tree_unflatten(structure, [find(path) for path, _ in paths])


def generic(path: tuple[Any, ...], names: Collection[str]) -> tuple[str | None, str]:
    """Return the name in ``path`` (None: there is none), and the path without it, as text."""
    import jax

    for i, key in enumerate(path):
        if isinstance(key, jax.tree_util.DictKey) and key.key in names:
            before, after = path[:i], path[i + 1 :]
            text = jax.tree_util.keystr(before) + PATH_OF_LEAF + jax.tree_util.keystr(after)
            return str(key.key), text
    return None, jax.tree_util.keystr(path)
