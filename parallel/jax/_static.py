"""Pytree nodes with static fields that several rank threads may compare at the same time.

``jax.jit`` compares the static fields of its arguments while it searches its cache of programs. If
the comparison runs Python code, another thread may change the cache meanwhile, and the process
crashes (jaxlib 0.10.2). The comparison of tuples of numbers and strings runs no Python code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from meshlib import DeviceMesh
from meshlib.extend import mesh_key

_Node = TypeVar("_Node")


class Static(tuple[Any, ...]):
    """The static fields of a node: ``values``, and a tuple of plain values to compare them by."""

    values: tuple[Any, ...]

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Static:
        """Return static fields of ``values``, with meshes and dataclasses compared as tuples."""
        static = cls(map(_comparable, values))
        static.values = values
        return static

    def __reduce__(self) -> tuple[Any, ...]:
        return Static.of, (self.values,)


def _comparable(value: Any) -> Any:
    if isinstance(value, DeviceMesh):
        return mesh_key(value)
    if dataclasses.is_dataclass(value):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return (type(value).__qualname__, *map(_comparable, fields))
    return value


def register_node(*static: str) -> Callable[[type[_Node]], type[_Node]]:
    """Register a dataclass as a pytree node whose leaf is its first field, ``array``.

    ``static`` names its other fields, in order.
    """

    def make_static(node: Any) -> Static:
        made = Static.of(tuple(getattr(node, name) for name in static))
        vars(node)["_static"] = made  # in __dict__, because the dataclasses are frozen
        return made

    def flatten(node: Any) -> tuple[tuple[Any], Static]:
        fields = node.__dict__  # JAX flattens each node at each call of a program
        return (fields["array"],), fields.get("_static") or make_static(node)

    def flatten_with_keys(node: Any) -> tuple[tuple[Any], Static]:
        (array,), known = flatten(node)
        return ((jax.tree_util.GetAttrKey("array"), array),), known

    def register(cls: Any) -> Any:

        def unflatten(known: Static, children: Any) -> Any:
            node = cls(*children, *known.values)
            vars(node)["_static"] = known
            return node

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return register
