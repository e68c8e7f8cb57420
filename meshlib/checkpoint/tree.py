"""The tree of a state: what is an array is taken out, the rest becomes JSON; and back.

A tree is made of dicts (keys: str, int), lists, tuples, named tuples and dataclass instances. Its
leaves are arrays and values: None, bool, int, float, complex, str, bytes and NumPy's scalars. In
JSON a value of the usual kinds is itself; everything else is an object of one member that says what
it is: ``{"dict": [[key, node], ...]}``, ``{"array": "model/weight"}``, ``{"float": "nan"}``.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from types import FunctionType, MethodType
from typing import Any, cast
from urllib.parse import quote

import numpy as np

from meshlib.checkpoint.errors import CheckpointError
from meshlib.checkpoint.files.zarr import ChunkGrid, dtype_name, dtype_of
from meshlib.checkpoint.leaves import is_array, is_wanted_array, why_not_like

Node = Any
"""JSON: a value, or an object of one member."""

Maker = Callable[[Callable[[str], Any]], Any]
"""Makes a tree, given a function that returns the array of a name."""

_LONGEST_NAME = 200  # a file's name may have 255 bytes
_SHOWN_DIFFERENCES = 8


def encode(tree: Any) -> tuple[Node, dict[str, Any]]:
    """Return ``tree`` as JSON, and its arrays by name: the path with ``/`` between the keys.

    Raises TypeError, naming the path, for what is neither a tree, nor a value, nor an array.
    """
    arrays: dict[str, Any] = {}
    names = _Names()

    def walk(node: Any, path: tuple[str, ...]) -> Node:
        if is_array(node):
            name = names.name(path)
            arrays[name] = node
            return {"array": name}
        children = children_of(node)
        if children is None:
            return _encode_value(node, path)
        kind, items = children
        encoded = [(key, walk(child, (*path, str(key)))) for key, child in items]
        if kind in ("list", "tuple"):
            return {kind: [child for _, child in encoded]}
        return {kind: [[key, child] for key, child in encoded]}

    return walk(tree, ()), arrays


def children_of(node: Any) -> tuple[str, list[tuple[Any, Any]]] | None:
    """Return a kind of tree (dict, fields, list, tuple) and its children by key; None for a leaf.

    Raises TypeError for a dict with keys that are neither str nor int.
    """
    if isinstance(node, Mapping):
        items = list(cast("Mapping[Any, Any]", node).items())
        for key, _ in items:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"a dict of the state has the key {key!r}; expected str or int")
        return "dict", items
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        names = cast("Any", node)._fields
        return "fields", list(zip(names, cast("tuple[Any, ...]", node), strict=True))
    if isinstance(node, list | tuple):
        kind = "list" if isinstance(node, list) else "tuple"
        return kind, list(enumerate(cast("Sequence[Any]", node)))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return "fields", [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    return None


class _Names:
    """Names for arrays: each key fit for a file, none twice (of 1 and "1"), none a group too."""

    def __init__(self) -> None:
        self._arrays: set[str] = set()
        self._groups: set[str] = set()

    def name(self, path: tuple[str, ...]) -> str:
        keys = [_file_name(key) for key in path] or ["array"]
        groups = ["/".join(keys[:end]) for end in range(1, len(keys))]
        for i, group in enumerate(groups):
            if group in self._arrays:
                keys[i] += "~group"
                return self.name(tuple(keys))
        name = free = "/".join(keys)
        number = 1
        while free in self._arrays or free in self._groups:
            number += 1
            free = f"{name}~{number}"
        self._arrays.add(free)
        self._groups.update(groups)
        return free


def _file_name(key: str) -> str:
    name = quote(key, safe=" ~+=,@()[]") or "%"
    if name.startswith("__") or not name.strip("."):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 20]}~{sha256(key.encode()).hexdigest()[:16]}"


# ---------------------------------------------------------------------------- values


def _encode_value(value: Any, path: tuple[str, ...]) -> Node:
    if isinstance(value, np.generic):
        data = base64.b64encode(np.asarray(value).tobytes()).decode()
        return {"scalar": [dtype_name(value.dtype, shown(path)), data]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    raise TypeError(
        f"state{shown(path)} is a {type(value).__module__}.{type(value).__qualname__}; expected an"
        " array, None, a number, str, bytes, or a dict, list, tuple or dataclass of them"
    )


def _decode_value(node: Node) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, data),) = cast("dict[str, Any]", node).items()
    if kind == "float":
        return float(data)
    if kind == "complex":
        return complex(*(float.fromhex(part) for part in data))
    if kind == "bytes":
        return base64.b64decode(data)
    if kind == "scalar":
        return np.frombuffer(base64.b64decode(data[1]), dtype_of(data[0]))[0]
    raise CheckpointError(f"the checkpoint has a node of the kind {kind!r}, which is not known")


def shown(path: Sequence[Any]) -> str:
    """Return a path as a program writes it: ``['model']['weight']``."""
    return "".join(f"[{key!r}]" for key in path)


def _kind(node: Node) -> tuple[str, Any]:
    """Return what a node is ("value" for all values) and what it holds."""
    if isinstance(node, dict):
        ((kind, data),) = cast("dict[str, Any]", node).items()
        if kind in ("array", "dict", "fields", "list", "tuple"):
            return kind, data
    return "value", node


def items_of(node: Node) -> list[tuple[Any, Node]] | None:
    """Return the children of a node by key, None for a leaf."""
    kind, data = _kind(node)
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
    kind, data = _kind(node)
    return data if kind == "array" else None


def decode(node: Node, array: Callable[[str], Any]) -> Any:
    """Return the tree of ``node`` with ``array(name)`` for each array; fields come as a dict."""
    kind, data = _kind(node)
    if kind == "array":
        return array(data)
    if kind in ("dict", "fields"):
        return {key: decode(child, array) for key, child in data}
    if kind in ("list", "tuple"):
        children = [decode(child, array) for child in data]
        return children if kind == "list" else tuple(children)
    return _decode_value(node)


# ---------------------------------------------------------------------------- a tree like another


class Matching:
    """Goes through a checkpoint's tree and the one that it is to be like, and notes what differs.

    ``grids`` has the checkpoint's arrays, by name. ``wanted`` has those that are needed afterwards,
    each with its leaf (``...`` for one that is wanted as it is).
    """

    def __init__(self, grids: Mapping[str, ChunkGrid], *, strict: bool) -> None:
        self._grids = grids
        self._strict = strict
        self.wanted: dict[str, Any] = {}
        self.differences: list[str] = []

    def grid(self, name: str) -> ChunkGrid:
        """Return an array's grid. Raises CheckpointError where it has no description."""
        if name not in self._grids:
            raise CheckpointError(
                f"the checkpoint's tree has array {name!r}, but not its description"
            )
        return self._grids[name]

    def check(self, where: str) -> None:
        """Raise CheckpointError that lists the differences, if there are any."""
        if not self.differences:
            return
        told = self.differences[:_SHOWN_DIFFERENCES]
        if len(self.differences) > len(told):
            told.append(f"and {len(self.differences) - len(told)} more")
        raise CheckpointError(f"{where} differs from what is to be loaded: {'; '.join(told)}")

    def match(self, node: Node, like: Any, path: tuple[Any, ...] = ()) -> Maker:
        """Return a function of ``array(name)`` that makes the tree; note what differs."""
        if like is ... or isinstance(like, FunctionType | MethodType):
            self._lay_out(node, like, path)
            return partial(decode, node)
        kind, data = _kind(node)
        if is_wanted_array(like):
            if kind != "array":
                return self._differ(path, f"is {_described(node)}, not an array")
            wrong = why_not_like(self.grid(data), like)
            if wrong is not None:
                return self._differ(path, wrong)
            self.wanted[data] = like
            return partial(decode, node)
        children = children_of(like)
        if children is None:
            if kind != "value":
                return self._differ(path, f"is {_described(node)}, not a value")
            return partial(decode, node)
        return self._match_children(node, like, children[1], path)

    def _lay_out(self, node: Node, like: Any, path: tuple[Any, ...]) -> None:
        """Note what the arrays below are to be like: what a function says, or as they are."""
        for below, leaf in leaves_of(node):
            name = array_of(leaf)
            if name is None:
                continue
            self.wanted[name] = chosen = ... if like is ... else like(below, self.grid(name).shape)
            if chosen is ...:
                continue
            wrong = f"is to be like {chosen!r}, says {like!r}; expected a Sharding or ..."
            if is_wanted_array(chosen):
                wrong = why_not_like(self.grid(name), chosen)
            if wrong is not None:
                self._differ((*path, *below), wrong)

    def _match_children(
        self, node: Node, like: Any, wanted: list[tuple[Any, Any]], path: tuple[Any, ...]
    ) -> Maker:
        items = items_of(node)
        if items is None:
            return self._differ(path, f"is {_described(node)}, not a {type(like).__name__}")
        there = dict(items)
        makers: list[tuple[Any, Maker]] = []
        for key, child in wanted:
            if key in there:
                makers.append((key, self.match(there.pop(key), child, (*path, key))))
            else:
                self._differ((*path, key), "is missing in it")
        if self._strict:
            for key in there:
                self._differ((*path, key), "is there too")
        return partial(_made, like, makers)

    def _differ(self, path: tuple[Any, ...], what: str) -> Maker:
        self.differences.append(f"{shown(path) or 'the tree'} {what}")
        return partial(decode, None)


def _made(like: Any, makers: list[tuple[Any, Maker]], array: Callable[[str], Any]) -> Any:
    items = [(key, make(array)) for key, make in makers]
    if isinstance(like, Mapping):
        return dict(items) if type(cast("Any", like)) is dict else type(cast("Any", like))(items)
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(cast("Any", like))(**dict(items))
    if isinstance(like, list | tuple):
        return type(cast("Any", like))(value for _, value in items)
    return dataclasses.replace(like, **dict(items))


def _described(node: Node) -> str:
    kind, data = _kind(node)
    if kind == "value":
        return f"the value {data!r}"
    return {"array": "an array", "fields": "a named tuple"}.get(kind, f"a {kind}")
