"""Conversion between the tree of a state and its JSON nodes with separate arrays.

A tree is made of dicts (keys: str, int), lists, tuples, named tuples and dataclass instances. Its
leaves are arrays and values: None, bool, int, float, complex, str, bytes and NumPy's scalars.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from hashlib import sha256
from types import FunctionType, MethodType
from typing import Any, cast
from urllib.parse import quote

from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.zarr import DOCUMENT, ChunkGrid
from meshlib.checkpoint._leaves import is_array, is_wanted_array, why_not_like
from meshlib.checkpoint._nodes import (
    DEEPEST,
    Node,
    array_of,
    decode,
    encode_value,
    items_of,
    kind_of,
    leaves_of,
    shown,
)

Maker = Callable[[Callable[[str], Any]], Any]
"""A function that makes a tree from a function ``array(name)``."""

_LONGEST_NAME = 200  # a file's name may have 255 bytes
_SHOWN_DIFFERENCES = 8


def encode(tree: Any) -> tuple[Node, dict[str, Any]]:
    """Return ``tree`` as JSON, and its arrays by name: the keys of the path joined by ``/``.

    Raises TypeError, which names the path, for an object that is not a tree, value or array. Also
    for a part of the tree that could not be rebuilt from its items.
    """
    arrays: dict[str, Any] = {}
    names = _Names()

    def walk(node: Any, path: tuple[str, ...]) -> Node:
        if is_array(node):
            name = names.name(path)
            arrays[name] = node
            return {"array": name}
        children = children_of(node, path)
        if children is None:
            return encode_value(node, path)
        if len(path) >= DEEPEST:
            raise TypeError(f"state{shown(path)} is deeper than {DEEPEST} levels")
        kind, items = children
        if type(node) not in (dict, list, tuple):
            _check_rebuilt(node, items, path)
        encoded = [(key, walk(child, (*path, str(key)))) for key, child in items]
        if kind in ("list", "tuple"):
            return {kind: [child for _, child in encoded]}
        return {kind: [[key, child] for key, child in encoded]}

    return walk(tree, ()), arrays


Items = list[tuple[Any, Any]]


def children_of(node: Any, path: Sequence[Any] = ()) -> tuple[str, Items] | None:
    """Return a node's kind (dict, fields, list, tuple) and its children by key; None for a leaf.

    Raises TypeError, which names the ``path``, for a dict with keys that are neither str nor int.
    """
    if isinstance(node, Mapping):
        items = list(cast("Mapping[Any, Any]", node).items())
        for key, _ in items:
            if type(key) not in (str, int):
                raise TypeError(f"state{shown(path)} has the key {key!r}; expected str or int")
        return "dict", items
    names = _fields_of(node)
    if names is not None:
        return "fields", [(name, getattr(node, name)) for name in names]
    if isinstance(node, list | tuple):
        kind = "list" if isinstance(node, list) else "tuple"
        return kind, list(enumerate(cast("Sequence[Any]", node)))
    return None


def _fields_of(node: Any) -> tuple[str, ...] | None:
    if isinstance(node, tuple):
        return getattr(node, "_fields", None)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return tuple(field.name for field in dataclasses.fields(node))
    return None


def _check_rebuilt(node: Any, items: Items, path: Sequence[Any]) -> None:
    """Raise TypeError unless ``made_like`` rebuilds ``node``, whose type is not a plain one."""
    kind: type[Any] = type(node)
    # An immutable mapping stores its items in attributes of its own.
    if isinstance(node, dict | list | tuple) or dataclasses.is_dataclass(node):
        more = vars(node).keys() - {key for key, _ in items} if hasattr(node, "__dict__") else ()
        why = f"it has the additional attributes {sorted(more)}" if more else ""
    else:
        why = "it may have state besides its items" if isinstance(node, MutableMapping) else ""
    if not why:
        try:
            made = made_like(node, items)
            again = cast("Any", children_of(made))[1]
            pairs = zip(items, again, strict=True)
            same = type(made) is kind and all(k == q and v is w for (k, v), (q, w) in pairs)
            why = "" if same else "the result differs"
        except Exception as error:  # noqa: BLE001 (of any class of the user's)
            why = f"{type(error).__name__}: {error}"
    if why:
        raise TypeError(
            f"state{shown(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be"
            f" rebuilt from its items ({why}); expected a dict, list, tuple or dataclass"
        )


def made_like(like: Any, items: Items) -> Any:
    """Return a part of a tree of the type of ``like``, with other children."""
    kind: type[Any] = type(like)
    values = [value for _, value in items]
    if kind in (dict, list, tuple):
        return kind(items) if kind is dict else kind(values)
    if isinstance(like, dict):
        made = copy.copy(cast("dict[Any, Any]", like))  # keeps the factory of a defaultdict
        made.clear()
        for key, value in items:
            made[key] = value
        return made
    if isinstance(like, list):
        made = copy.copy(cast("list[Any]", like))
        made[:] = values
        return made
    if isinstance(like, Mapping):
        return kind(dict(items))
    if isinstance(like, tuple):
        return cast("Any", kind)._make(values) if hasattr(kind, "_fields") else kind(values)
    # Bypass the constructor, which may lack fields and compute others, and frozen's __setattr__.
    made = object.__new__(kind)
    for name, value in items:
        object.__setattr__(made, name, value)
    return made


class _Names:
    """Unique names for arrays, with keys that are valid file names.

    Keys such as 1 and "1" get different names, and no name is both an array's and a group's.
    """

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
    name = quote(key, safe=" ~+=,@()[]", errors="surrogatepass") or "%"
    if name.startswith("__") or not name.strip(".") or name == DOCUMENT:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _LONGEST_NAME:
        return name
    digest = sha256(key.encode(errors="surrogatepass")).hexdigest()
    return f"{name[: _LONGEST_NAME - 20]}~{digest[:16]}"


# ---------------------------------------------------------------------------- matching trees


class Matching:
    """A comparison of a checkpoint's tree with the tree to load, which collects the differences.

    ``grids`` has the checkpoint's arrays, by name. ``wanted`` has the arrays to read, each with the
    leaf that describes its form (``...`` for the saved form).
    """

    def __init__(self, grids: Mapping[str, ChunkGrid], *, strict: bool) -> None:
        self._grids = grids
        self._strict = strict
        self.wanted: dict[str, Any] = {}
        self.differences: list[str] = []

    def check(self, where: str) -> None:
        """Raise CheckpointError, which lists the differences, if there are any."""
        if not self.differences:
            return
        shown = self.differences[:_SHOWN_DIFFERENCES]
        if len(self.differences) > len(shown):
            shown.append(f"and {len(self.differences) - len(shown)} more")
        raise CheckpointError(f"{where} differs from the tree to load: {'; '.join(shown)}")

    def match(self, node: Node, like: Any, path: tuple[Any, ...] = ()) -> Maker:
        """Return the ``Maker`` of the tree; collect differences."""
        if like is ... or isinstance(like, FunctionType | MethodType):
            self._lay_out(node, like, path)
            return partial(decode, node)
        kind, data = kind_of(node)
        if is_wanted_array(like):
            if kind != "array":
                return self._differ(path, f"is {_described(node)}, not an array")
            wrong = why_not_like(self._grids[data], like)
            if wrong is not None:
                return self._differ(path, wrong)
            self.wanted[data] = like
            return partial(decode, node)
        children = children_of(like, path)
        if children is None:
            if kind != "value":
                return self._differ(path, f"is {_described(node)}, not a value")
            return partial(decode, node)
        return self._match_children(node, like, children[1], path)

    def _lay_out(self, node: Node, like: Any, path: tuple[Any, ...]) -> None:
        """Add the arrays below ``node`` to ``wanted``, in the form that ``like`` returns or is."""
        for below, leaf in leaves_of(node):
            name = array_of(leaf)
            if name is None:
                continue
            self.wanted[name] = chosen = (
                ... if like is ... else like(below, self._grids[name].shape)
            )
            if chosen is ...:
                continue
            wrong = f"got {chosen!r} from {like!r}; expected a Sharding or ..."
            if is_wanted_array(chosen):
                wrong = why_not_like(self._grids[name], chosen)
            if wrong is not None:
                self._differ((*path, *below), wrong)

    def _match_children(self, node: Node, like: Any, wanted: Items, path: tuple[Any, ...]) -> Maker:
        items = items_of(node)
        if items is None:
            return self._differ(path, f"is {_described(node)}, not a {type(like).__name__}")
        there = dict(items)
        makers: list[tuple[Any, Maker]] = []
        for key, child in wanted:
            if key in there:
                makers.append((key, self.match(there.pop(key), child, (*path, key))))
            else:
                self._differ((*path, key), "is missing in the checkpoint")
        if self._strict:
            for key in there:
                self._differ((*path, key), "is only in the checkpoint")
        return partial(_made, like, makers)

    def _differ(self, path: tuple[Any, ...], what: str) -> Maker:
        self.differences.append(f"{shown(path) or 'the tree'} {what}")
        return partial(decode, None)


def _made(like: Any, makers: list[tuple[Any, Maker]], array: Callable[[str], Any]) -> Any:
    return made_like(like, [(key, make(array)) for key, make in makers])


def _described(node: Node) -> str:
    kind, data = kind_of(node)
    if kind == "value":
        return f"the value {data!r}"
    return {"array": "an array", "fields": "a named tuple"}.get(kind, f"a {kind}")
