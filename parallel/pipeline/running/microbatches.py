"""Cutting a batch into microbatches of the same size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from parallel.arrays import Array
from parallel.nested import map_leaves


def rows_of(array: Any, i: int, count: int, name: str) -> Array:
    """Return the rows of microbatch ``i`` of ``count``.

    Raises TypeError for what is no array with dims, ValueError where its first dim does not divide.
    """
    shape = getattr(array, "shape", None)
    if not shape:
        raise TypeError(
            f"{name} must be an array whose first dim is divided into {count} microbatches, got "
            f"{type(array).__name__}"
        )
    if shape[0] % count or not shape[0]:
        raise ValueError(
            f"{name} has {shape[0]} rows, which do not divide into {count} microbatches"
        )
    rows = shape[0] // count
    return array[i * rows : (i + 1) * rows]


def cut(args: Sequence[Array], count: int, name: str) -> list[tuple[Array, ...]]:
    """Return for each of ``count`` microbatches its rows of each of ``args``."""
    return [
        tuple(rows_of(array, i, count, f"{name}[{j}]") for j, array in enumerate(args))
        for i in range(count)
    ]


def cut_kwargs(kwargs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return for each microbatch its rows of the arrays in ``kwargs``; other values are whole."""

    def part(i: int, path: str, leaf: Any) -> Any:
        has_rows = getattr(leaf, "shape", None)
        return rows_of(leaf, i, count, f"kwargs{path}") if has_rows else leaf

    return [map_leaves(partial(part, i), dict(kwargs)) for i in range(count)]


def cut_target(target: Any, count: int) -> list[Any]:
    """Return for each microbatch its rows of the arrays in ``target``, however nested."""

    def part(i: int, path: str, leaf: Any) -> Any:
        return rows_of(leaf, i, count, f"target{path}")

    return [map_leaves(partial(part, i), target) for i in range(count)]
