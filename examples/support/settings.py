"""Settings from a TOML file. Errors name the file and the key."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

T = TypeVar("T")


class SettingsFile:
    """The tables of the TOML file at ``path``. Raises ValueError for a file that is not TOML."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._tables = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    def read(self, name: str, kind: type[T], positive: Sequence[str] = ()) -> T:
        """Return table ``name`` as ``kind``, a dataclass with a field for each key.

        Raises ValueError with the file and the key for a missing or unknown key, a negative value,
        0 in a ``positive`` field, and a wrong type. An integer is accepted for a float.
        """
        table = self._tables.get(name)
        if not isinstance(table, dict):
            raise ValueError(f"{self.path}: there is no table [{name}]")
        expected = get_type_hints(kind)
        for key in table:
            if key not in expected:
                near = get_close_matches(key, expected, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; expected {', '.join(expected)}"
                raise ValueError(f"{self.path}: [{name}] {key} is not known{hint}")
        values = kind(**{f.name: self._value(name, table, f.name, expected) for f in fields(kind)})
        for key in positive:
            if not getattr(values, key):
                self.wrong(name, key, "expected more than 0")
        return values

    def wrong(self, name: str, key: str, why: str) -> NoReturn:
        """Raise the ValueError for a key whose value contradicts another setting."""
        raise ValueError(f"{self.path}: [{name}] {key} is {self._tables[name][key]!r}, {why}")

    def _value(self, name: str, table: dict[str, Any], key: str, expected: dict[str, type]) -> Any:
        kind = expected[key]
        if key not in table:
            raise ValueError(f"{self.path}: [{name}] {key} is missing; expected {_words(kind)}")
        value = table[key]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.wrong(name, key, f"expected {_words(kind)}")
        if not isinstance(value, str | bool) and value < 0:
            self.wrong(name, key, "expected 0 or more")
        return value


def _words(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind]
