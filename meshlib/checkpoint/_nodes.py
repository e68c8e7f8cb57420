"""A tree as JSON: its nodes, and the values that they encode.

A common value, such as a string, is its own node. Everything else is an object with one member,
whose key is the kind:
``{"dict": [[key, node], ...]}``, ``{"array": "model/weight"}``, ``{"float": "nan"}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import numpy as np

from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.zarr import dtype_name, dtype_of

Node = Any
"""JSON: a value, or an object of one member."""

DEEPEST = 100
"""The largest depth of a tree, limited because walking it recurses."""


def encode_value(value: Any, path: tuple[str, ...]) -> Node:
    """Return the node of a leaf that is not an array.

    Raises TypeError, which names the path, for other types. These include subclasses of int, str
    and so on, which would be loaded as the base type.
    """
    if isinstance(value, np.generic):
        data = base64.b64encode(np.asarray(value).tobytes()).decode()
        return {"scalar": [dtype_name(value.dtype, shown(path)), data]}
    kind: type[Any] = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        # JSON's readers, and Python's own, limit the digits of a number.
        return value if abs(value) < 1 << 63 else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise TypeError(
        f"state{shown(path)} is a {kind.__module__}.{kind.__qualname__}; expected an"
        " array, None, a number, str, bytes, or a dict, list, tuple or dataclass of them"
    )


def _decode_value(node: Node) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, data),) = cast("dict[str, Any]", node).items()
    if kind == "float":
        return float(data)
    if kind == "int":
        return int(data, 16)
    if kind == "complex":
        real, imaginary = (float.fromhex(part) for part in data)
        return complex(real, imaginary)
    if kind == "bytes":
        return base64.b64decode(data)
    if kind == "scalar":
        (value,) = np.frombuffer(base64.b64decode(data[1]), dtype_of(data[0]))
        return value
    raise CheckpointError(f"the checkpoint has a node of the unknown kind {kind!r}")


def check_node(node: Node, arrays: AbstractSet[str], depth: int = 0) -> None:
    """Raise an error unless ``node`` is a tree as ``encode`` makes it, of arrays in ``arrays``.

    The error is a CheckpointError, or a ValueError, TypeError or AttributeError from decoding a
    value.
    """
    if depth > DEEPEST:
        raise CheckpointError(f"the checkpoint's tree has more than {DEEPEST} levels")
    kind, data = kind_of(node)
    if kind == "value":
        if isinstance(node, list):
            raise CheckpointError(f"the checkpoint's tree has the bare list {node!r}")
        _decode_value(node)
    elif kind == "array":
        if data not in arrays:
            raise CheckpointError(
                f"the checkpoint's tree has array {data!r}, but not its description"
            )
    else:
        if not isinstance(data, list):
            raise CheckpointError(f"the checkpoint's tree has a {kind} of {data!r}")
        for key, child in items_of(node) or ():
            if type(key) not in (str, int):
                raise CheckpointError(f"the checkpoint's tree has the key {key!r}")
            check_node(child, arrays, depth + 1)


def shown(path: Sequence[Any]) -> str:
    """Return a path in Python syntax: ``['model']['weight']``."""
    return "".join(f"[{key!r}]" for key in path)


def kind_of(node: Node) -> tuple[str, Any]:
    """Return the kind of a node ("value" for all values) and its contents."""
    if isinstance(node, dict):
        ((kind, data),) = cast("dict[str, Any]", node).items()
        if kind in ("array", "dict", "fields", "list", "tuple"):
            return kind, data
    return "value", node


def items_of(node: Node) -> list[tuple[Any, Node]] | None:
    """Return the children of a node by key, None for a leaf."""
    kind, data = kind_of(node)
    if kind in ("dict", "fields"):
        return [(key, child) for key, child in data]
    return list(enumerate(data)) if kind in ("list", "tuple") else None


def leaves_of(node: Node, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Node]]:
    """Yield the path and node of each leaf: arrays and values."""
    items = items_of(node)
    if items is None:
        yield path, node
    for key, child in items or ():
        yield from leaves_of(child, (*path, key))


def array_of(node: Node) -> str | None:
    """Return the name of the array that a node stands for, None for anything else."""
    kind, data = kind_of(node)
    return data if kind == "array" else None


def decode(node: Node, array: Callable[[str], Any]) -> Any:
    """Return the tree of ``node`` with ``array(name)`` for each array, and a dict for fields."""
    kind, data = kind_of(node)
    if kind == "array":
        return array(data)
    if kind in ("dict", "fields"):
        return {key: decode(child, array) for key, child in data}
    if kind in ("list", "tuple"):
        children = [decode(child, array) for child in data]
        return children if kind == "list" else tuple(children)
    return _decode_value(node)
