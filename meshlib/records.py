"""Frozen records as JSON and back: what ranks and launchers write for each other.

``json.dumps(record, default=values_of)`` writes a dataclass and what lies inside of it, ``build``
makes it again by the annotations of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Make = Callable[[Any], Any]


def values_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, as they are."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the record of ``cls`` whose fields JSON gave as ``values``.

    Inside of a field there may be dataclasses, named tuples and tuples, also in a sequence or as
    the values of a mapping, or None instead. Raises TypeError or AttributeError for what is no
    such record.
    """
    made = {name: make(values[name]) for name, make in _makers(cls) if name in values}
    return cls(**{**values, **made})


@cache
def _makers(cls: type[Any]) -> Sequence[tuple[str, _Make]]:
    """Return the fields whose values are not what JSON gives, and what makes them of that."""
    hints = get_type_hints(cls)
    found = [(field.name, _maker(hints[field.name])) for field in fields(cls)]
    return [(name, make) for name, make in found if make is not None]


def _maker(hint: Any) -> _Make | None:
    """Return what makes a value as ``hint`` has it out of JSON's, or None where that is one."""
    origin, inner = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(build, hint)
    if hasattr(hint, "_make"):
        return hint._make
    if NoneType in inner:
        make = next(filter(None, map(_maker, inner)), None)
        return make and (lambda value: None if value is None else make(value))
    if origin is tuple:
        return tuple
    make = _maker(inner[-1]) if inner else None
    if make is None:
        return None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return lambda values: {name: make(value) for name, value in values.items()}
    return lambda values: [make(value) for value in values]
