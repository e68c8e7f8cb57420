"""Frozen records as JSON and back, for messages between ranks and launchers.

``json.dumps(record, default=values_of)`` writes a dataclass and its contents. ``build`` restores
it, guided by the annotations of its fields.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Make = Callable[[Any], Any]
# JSON does not distinguish int and float.
_PLAIN: Mapping[Any, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
    NoneType: (NoneType,),
}


class JsonRecord:
    """The base of dataclasses that are sent as one JSON object."""

    __slots__ = ()
    title: ClassVar[str] = "record"
    """The record's name in error messages: "not a flight record: …"."""

    def pack(self) -> str:
        """Return the record as JSON."""
        return json.dumps(self, default=values_of, separators=(",", ":"))

    @classmethod
    def unpack(cls, data: bytes | str) -> Self:
        """Return the record in ``data``. Raises ValueError with the reason if ``data`` has none."""
        try:
            return build(cls, json.loads(data))
        except RecursionError:
            raise ValueError(f"not a {cls.title}: it is nested too deeply") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"not a {cls.title}: {error}") from error


def values_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, unchanged; of a range, its three numbers."""
    if isinstance(record, range):
        return {"start": record.start, "stop": record.stop, "step": record.step}
    return {field.name: getattr(record, field.name) for field in fields(record)}


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return the record of ``cls`` with the fields ``values``, parsed from JSON.

    Fields hold numbers, strings, booleans, None, dataclasses, named tuples and tuples, or sequences
    and mappings of these. Raises TypeError or AttributeError that names the field for a value of
    another type, a missing field or an unknown field.
    """
    made: dict[str, Any] = {}
    for name, make in _makers(cls):
        if name in values:
            try:
                made[name] = make(values[name])
            except (TypeError, AttributeError) as error:
                raise TypeError(f"{name}: {error}") from None
    return cls(**{**values, **made})


@cache
def _makers(cls: type[Any]) -> Sequence[tuple[str, _Make]]:
    """Return the fields of ``cls`` with the functions that make their values from JSON's."""
    hints = get_type_hints(cls)
    found = [(field.name, _maker(hints[field.name])) for field in fields(cls)]
    return [(name, make) for name, make in found if make is not None]


def _maker(hint: Any) -> _Make | None:
    """Return the function that makes a value of type ``hint`` from JSON's; None: any value fits."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return partial(_plain, _PLAIN[hint])
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(build, hint)
    if hasattr(hint, "_make"):
        return partial(_named_tuple, hint, list(map(_maker, get_type_hints(hint).values())))
    if origin in (Union, types.UnionType):
        if all(kind in _PLAIN for kind in inner):
            return partial(_plain, tuple(kind for one in inner for kind in _PLAIN[one]))
        make = next(filter(None, map(_maker, (kind for kind in inner if kind is not NoneType))))
        return lambda value: None if value is None else make(value)
    if origin is tuple and inner[-1] is not Ellipsis:
        return partial(_fixed_tuple, list(map(_maker, inner)))
    if origin is tuple:
        each = _sequence_maker(inner[0])
        return lambda values: tuple(each(values))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        make = _maker(inner[1]) or _unchanged
        return lambda values: {name: make(value) for name, value in values.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _sequence_maker(inner[0])
    return None


def _plain(kinds: tuple[type, ...], value: Any) -> Any:
    if type(value) not in kinds:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"expected {expected}, got {value!r}")
    return value


def _sequence_maker(hint: Any) -> _Make:
    kinds, make = _PLAIN.get(hint), _maker(hint) or _unchanged

    def sequence(values: Any) -> Sequence[Any]:
        if isinstance(values, Mapping):  # a range, as ``values_of`` writes it
            return range(*_fixed_tuple([_maker(int)] * 3, list(values.values())))
        if not isinstance(values, list | tuple):
            raise TypeError(f"expected a list, got {values!r}")
        if kinds is not None and set(map(type, values)).issubset(kinds):
            return values
        return [make(value) for value in values]

    return sequence


def _named_tuple(cls: Any, makers: Sequence[_Make | None], values: Any) -> Any:
    return cls._make(_fixed_tuple(makers, values))


def _fixed_tuple(makers: Sequence[_Make | None], values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple) or len(values) != len(makers):
        raise TypeError(f"expected a list of {len(makers)} values, got {values!r}")
    pairs = zip(makers, values, strict=True)
    return tuple(value if make is None else make(value) for make, value in pairs)


def _unchanged(value: Any) -> Any:
    return value
