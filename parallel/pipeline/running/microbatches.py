"""Cutting a batch into microbatches of the same size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from parallel.arrays import Array
from parallel.nested import map_leaves


def check_divisible(array: Any, count: int, name: str) -> int:
    """Return the rows of a microbatch.

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
    return shape[0] // count


def cut(args: Sequence[Array], count: int, name: str) -> list[tuple[Array, ...]]:
    """Return for each of ``count`` microbatches its rows of each of ``args``."""
    rows = [check_divisible(array, count, f"{name}[{i}]") for i, array in enumerate(args)]
    return [
        tuple(array[i * n : (i + 1) * n] for array, n in zip(args, rows, strict=True))
        for i in range(count)
    ]


def cut_kwargs(kwargs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return for each microbatch its rows of the arrays in ``kwargs``; other values are whole."""

    def part(i: int, path: str, leaf: Any) -> Any:
        if not getattr(leaf, "shape", None):
            return leaf
        rows = check_divisible(leaf, count, f"kwargs{path}")
        return leaf[i * rows : (i + 1) * rows]

    return [map_leaves(partial(part, i), dict(kwargs)) for i in range(count)]


def cut_target(target: Any, count: int) -> list[Any]:
    """Return for each microbatch its rows of the arrays in ``target``, however nested."""

    def part(i: int, path: str, leaf: Any) -> Any:
        rows = check_divisible(leaf, count, f"target{path}")
        return leaf[i * rows : (i + 1) * rows]

    return [map_leaves(partial(part, i), target) for i in range(count)]
