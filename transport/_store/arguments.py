"""Checks of the arguments of stores, and their conversion to fields of commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transport._checks import to_whole_number

Value = bytes | bytearray | memoryview | str
_MOST = 2**63 - 1


def to_bytes(value: Value, name: str = "value") -> bytes:
    """Return ``value`` as bytes (``str`` as UTF-8); raise TypeError for anything else.

    The error names the argument ``name``.
    """
    if isinstance(value, str):
        return value.encode()
    try:
        return bytes(memoryview(value))
    except TypeError:
        raise TypeError(f"{name} must be bytes or str, got {type(value).__name__}") from None


def to_key(key: str, name: str = "key") -> bytes:
    """Return ``key`` as it is stored; raise TypeError naming ``name`` unless it is a ``str``."""
    if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be str, got {type(key).__name__}: {key!r}")
    return key.encode("utf-8", "surrogateescape")


def from_key(key: bytes) -> str:
    """Return the ``str`` that is stored as ``key``."""
    return key.decode("utf-8", "surrogateescape")


def key_name(key: bytes) -> str:
    """Return the name behind a stored key, for messages."""
    return key.decode("utf-8", "backslashreplace")


def list_keys(keys: Sequence[str]) -> list[str]:
    """Return ``keys`` as a list; raise TypeError for a single ``str``, or if not iterable."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"keys must be a list of str, got the {type(keys).__name__} {keys!r}")
    return list(keys)


def list_values(values: Sequence[Value]) -> list[bytes]:
    """Return ``values`` as a list of bytes; raise TypeError for a single value."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"values must be a list of bytes or str, got the {type(values).__name__} {values!r}"
        )
    return [to_bytes(value, f"values[{i}]") for i, value in enumerate(values)]


def to_offset(offset: int) -> int:
    """Return ``offset``; raise ValueError if it is negative, TypeError if not an integer."""
    number = to_whole_number(offset, "offset")
    if number < 0:
        raise ValueError(f"offset must be >= 0, got {offset}")
    return min(number, _MOST)  # longer than any value
