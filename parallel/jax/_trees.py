"""Pytrees of parameters: paths, trained leaves, and checks that ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlib import ProcessGroup
from parallel._arrays import written
from parallel._core.replicas import (
    broadcast_coalesced,
    check_same,
    describe_options,
    first_difference,
)
from parallel._nested import matches


def path_of(path: Any) -> str:
    """Return JAX's ``path`` to a node as a string such as ``"blocks.0.weight"``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def leaves_below(tree: Any, patterns: Sequence[str], what: str) -> list[str]:
    """Return the paths of the leaves at or below the nodes that match ``patterns``.

    Raises ValueError for a pattern that matches no node; its message begins with ``what``.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path_of(path) for path, _ in leaves]
    found: dict[str, None] = {}
    for pattern in patterns:
        names = pattern.count(".") + 1
        own = [path for path in paths if matches(".".join(path.split(".")[:names]), pattern)]
        if not own:
            raise ValueError(f"{what} has {pattern!r}, which matches no node; leaves are {paths}")
        found |= dict.fromkeys(own)
    return list(found)


def map_nodes(function: Callable[[str, Any], Any], tree: Any, patterns: Sequence[str]) -> Any:
    """Return ``tree`` with ``function(path, node)`` in place of nodes that match ``patterns``."""

    def matched(path: Any, _: Any) -> bool:
        return any(matches(path_of(path), pattern) for pattern in patterns)

    def replace(path: Any, node: Any) -> Any:
        return function(path_of(path), node) if matched(path, node) else node

    return jax.tree_util.tree_map_with_path(replace, tree, is_leaf=matched, is_leaf_takes_path=True)


def is_trained(leaf: Any) -> bool:
    """True if ``leaf`` is a floating-point or complex array."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


@dataclass(frozen=True)
class TreeOfParameters:
    """The structure of a pytree, which must be the same on all ranks and in all steps."""

    structure: Any
    paths: tuple[str, ...]
    specs: tuple[jax.ShapeDtypeStruct | None, ...]
    """Each leaf's shape, and the dtype that JAX computes in; None if it is not trained."""
    untrained: tuple[str, ...]
    """The dtype and shape of each untrained array; "" for trained leaves and for other leaves.

    Numbers also have "", because they may be Python numbers on one rank and arrays on another.
    """

    @classmethod
    def of(cls, tree: Any) -> TreeOfParameters:
        """Describe ``tree``."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        return cls(
            structure,
            tuple(jax.tree_util.keystr(path) or "(the tree itself)" for path, _ in leaves),
            tuple(_spec(leaf) if is_trained(leaf) else None for _, leaf in leaves),
            tuple("" if is_trained(leaf) else _describe_array(leaf) for _, leaf in leaves),
        )

    def lines(self) -> list[str]:
        """Return a line for each leaf, which must be the same in all steps."""
        return [
            f"{path} {'not trained' if spec is None else written(spec)}"
            for path, spec in zip(self.paths, self.specs, strict=True)
        ]

    def trained(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each trained leaf by its path, in the tree's order."""
        pairs = zip(self.paths, self.specs, strict=True)
        return {path: spec for path, spec in pairs if spec is not None}

    def check(self, tree: Any, name: str) -> None:
        """Raise ValueError, naming the first different leaf, unless ``tree`` has this structure."""
        other = TreeOfParameters.of(tree)
        text = first_difference(other.lines(), self.lines())
        if text is not None:
            text = text.replace("rank 0", "the wrapper's parameters")
            raise ValueError(f"{name} differs from the parameters at construction: it {text}")
        if other.structure != self.structure:
            raise ValueError(f"{name} has structure {other.structure}; expected {self.structure}")

    def leaves_of(self, gradients: Any, name: str) -> list[Any]:
        """Return the leaves of ``gradients``, which must match the trained leaves.

        Raises ValueError, naming the first leaf that differs in shape or dtype.
        """
        leaves = jax.tree_util.tree_leaves(gradients)
        trained = self.trained()
        if len(leaves) != len(trained):
            raise ValueError(
                f"{name} has {len(leaves)} leaves; expected a gradient for each of the "
                f"{len(trained)} trained leaves of the parameters"
            )
        for (path, spec), leaf in zip(trained.items(), leaves, strict=True):
            if jnp.shape(leaf) != spec.shape or jnp.result_type(leaf) != spec.dtype:
                raise ValueError(
                    f"{name}{path} is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}; expected "
                    f"{written(spec)}"
                )
        return leaves

    def split(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """Return the trained leaves, and a list of all leaves with None in place of these."""
        leaves = jax.tree_util.tree_leaves(tree)
        pairs = list(zip(leaves, self.specs, strict=True))
        return (
            [leaf for leaf, spec in pairs if spec is not None],
            [leaf if spec is None else None for leaf, spec in pairs],
        )

    def join(self, trained: Sequence[Any], others: Sequence[Any] | None = None) -> Any:
        """Return the tree whose ``split`` these lists are; without ``others``, those are None."""
        leaves = list(others or [None] * len(self.specs))
        remaining = iter(trained)
        for place, spec in enumerate(self.specs):
            if spec is not None:
                leaves[place] = next(remaining)
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def check_same_tree(tree: TreeOfParameters, group: ProcessGroup, **options: object) -> None:
    """Raise ValueError on every rank, naming the first difference, if trees or options differ."""
    pairs = zip(tree.lines(), tree.untrained, strict=True)
    leaves = [f"parameter {line}{untrained}" for line, untrained in pairs]
    check_same([*describe_options(**options), *leaves], group)


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    # Unless double precision is enabled, JAX treats a NumPy array of float64 as float32.
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _describe_array(leaf: Any) -> str:
    shape = getattr(leaf, "shape", ())
    return f" ({leaf.dtype}{list(shape)})" if shape and hasattr(leaf, "dtype") else ""


def copies_of_rank_0(arrays: Sequence[Any], group: ProcessGroup) -> list[jax.Array]:
    """Return group rank 0's values of ``arrays`` on every rank, as new JAX arrays."""
    hosts = [np.array(array) for array in arrays]
    broadcast_coalesced(hosts, group)
    return [
        jax.device_put(host, array.sharding)
        if isinstance(array, jax.Array) and array.committed
        else jnp.asarray(host)
        for host, array in zip(hosts, arrays, strict=True)
    ]
