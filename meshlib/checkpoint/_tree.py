"""The tree of a state: arrays are taken out, the rest becomes nodes; and back.

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
"""Makes a tree, given a function that returns the array of a name."""

_LONGEST_NAME = 200  # a file's name may have 255 bytes
_SHOWN_DIFFERENCES = 8


def encode(tree: Any) -> tuple[Node, dict[str, Any]]:
    """Return ``tree`` as JSON, and its arrays by name: the path with ``/`` between the keys.

    Raises TypeError with the path for an object that is not a tree, value or array. Raises it too
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
            _check_made_again(node, items, path)
        encoded = [(key, walk(child, (*path, str(key)))) for key, child in items]
        if kind in ("list", "tuple"):
            return {kind: [child for _, child in encoded]}
        return {kind: [[key, child] for key, child in encoded]}

    return walk(tree, ()), arrays


Items = list[tuple[Any, Any]]


def children_of(node: Any, path: Sequence[Any] = ()) -> tuple[str, Items] | None:
    """Return a kind of tree (dict, fields, list, tuple) and its children by key; None for a leaf.

    Raises TypeError, naming the ``path``, for a dict with keys that are neither str nor int.
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


def _check_made_again(node: Any, items: Items, path: Sequence[Any]) -> None:
    """Raise TypeError unless ``made_like`` gives a part of a tree back that is not a plain one."""
    kind: type[Any] = type(node)
    # An immutable mapping keeps its items in attributes of its own.
    if isinstance(node, dict | list | tuple) or dataclasses.is_dataclass(node):
        more = vars(node).keys() - {key for key, _ in items} if hasattr(node, "__dict__") else ()
        why = f"it has the attributes {sorted(more)} besides" if more else ""
    else:
        why = "it is more than its items" if isinstance(node, MutableMapping) else ""
    if not why:
        try:
            made = made_like(node, items)
            again = cast("Any", children_of(made))[1]
            pairs = zip(items, again, strict=True)
            same = type(made) is kind and all(k == q and v is w for (k, v), (q, w) in pairs)
            why = "" if same else "that gives another one"
        except Exception as error:  # noqa: BLE001 (of any class of the user's)
            why = f"{type(error).__name__}: {error}"
    if why:
        raise TypeError(
            f"state{shown(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be made"
            f" again from its items ({why}); expected a dict, list, tuple or dataclass"
        )


def made_like(like: Any, items: Items) -> Any:
    """Return a part of a tree of the type of ``like``, with other children."""
    kind: type[Any] = type(like)
    values = [value for _, value in items]
    if kind in (dict, list, tuple):
        return kind(items) if kind is dict else kind(values)
    if isinstance(like, dict):
        made = copy.copy(cast("dict[Any, Any]", like))  # with the factory of a defaultdict
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
    # Past the constructor, which takes not all fields, and computes some; and past frozen ones.
    made = object.__new__(kind)
    for name, value in items:
        object.__setattr__(made, name, value)
    return made


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
    name = quote(key, safe=" ~+=,@()[]", errors="surrogatepass") or "%"
    if name.startswith("__") or not name.strip(".") or name == DOCUMENT:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _LONGEST_NAME:
        return name
    digest = sha256(key.encode(errors="surrogatepass")).hexdigest()
    return f"{name[: _LONGEST_NAME - 20]}~{digest[:16]}"


# ---------------------------------------------------------------------------- a tree like another


class Matching:
    """Compares a checkpoint's tree with the tree to load, and notes the differences.

    ``grids`` has the checkpoint's arrays, by name. ``wanted`` has those that are needed afterwards,
    each with its leaf (``...`` for one that is wanted as it is).
    """

    def __init__(self, grids: Mapping[str, ChunkGrid], *, strict: bool) -> None:
        self._grids = grids
        self._strict = strict
        self.wanted: dict[str, Any] = {}
        self.differences: list[str] = []

    def check(self, where: str) -> None:
        """Raise CheckpointError that lists the differences, if there are any."""
        if not self.differences:
            return
        shown = self.differences[:_SHOWN_DIFFERENCES]
        if len(self.differences) > len(shown):
            shown.append(f"and {len(self.differences) - len(shown)} more")
        raise CheckpointError(f"{where} differs from what is to be loaded: {'; '.join(shown)}")

    def match(self, node: Node, like: Any, path: tuple[Any, ...] = ()) -> Maker:
        """Return a function of ``array(name)`` that makes the tree; note the differences."""
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
        """Note the wanted forms of the arrays below: from a function, or their own."""
        for below, leaf in leaves_of(node):
            name = array_of(leaf)
            if name is None:
                continue
            self.wanted[name] = chosen = (
                ... if like is ... else like(below, self._grids[name].shape)
            )
            if chosen is ...:
                continue
            wrong = f"is to be like {chosen!r}, says {like!r}; expected a Sharding or ..."
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
                self._differ((*path, key), "is missing in it")
        if self._strict:
            for key in there:
                self._differ((*path, key), "is there too")
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
