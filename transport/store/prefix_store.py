"""A part of another store, apart from its other users' keys."""

# ruff: noqa: D102 (the methods without words are Store's, which has them)

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from transport.deadline import Timeout
from transport.errors import DistError
from transport.store.base import Store, Value, list_keys, to_key

T = TypeVar("T")


class PrefixStore(Store):
    """Wraps ``store`` and puts ``prefix/`` before every key.

    The timeout is the wrapped store's, and so is ``num_keys`` (keys of all prefixes). ``close``
    closes the wrapped store: call it on what a ``clone`` returned, or when nobody shares it.
    Raises TypeError for a ``prefix`` that is no ``str`` and a ``store`` that is no ``Store``.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        to_key(prefix, "prefix")
        if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"store must be a Store, got {type(store).__name__}: {store!r}")
        super().__init__(store.timeout)
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store that is wrapped."""
        return self._store

    @property
    def prefix(self) -> str:
        """What is put, with a slash, before every key."""
        return self._prefix

    @property
    def serves(self) -> bool:
        return self._store.serves

    @property
    def timeout(self) -> timedelta:
        """The wrapped store's timeout."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the wrapped store's timeout."""
        self._store.set_timeout(timeout)

    def set(self, key: str, value: Value) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        return self._store.get(self._key(key), timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._key(key), amount)

    def append(self, key: str, value: Value) -> None:
        self._store.append(self._key(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._keys(keys))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        return self._store.compare_set(self._key(key), expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._keys(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._store.multi_set(self._keys(keys), values)

    def num_keys(self) -> int:
        """Return the number of keys in the wrapped store, whatever their prefix."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys under this prefix, without it."""
        start = self._key("")
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._store.wait(self._keys(keys), timeout)

    def queue_push(self, key: str, value: Value) -> None:
        self._store.queue_push(self._key(key), value)

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        return self._store.queue_pop(self._key(key), block, timeout)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._key(key))

    def tail(self, key: str, offset: int, timeout: Timeout | None = None) -> bytes:
        return self._store.tail(self._key(key), offset, timeout)

    def set_will(self, key: str, value: Value) -> bool:
        return self._store.set_will(self._key(key), value)

    def with_patience(self, seconds: float) -> PrefixStore:
        """See ``Store``: the same prefix over the wrapped store with patience."""
        return PrefixStore(self._prefix, self._store.with_patience(seconds))

    def clone(self) -> PrefixStore:
        """Return a store with the same prefix over a clone of the wrapped store."""
        return PrefixStore(self._prefix, self._store.clone())

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        """Have the waits of all who use the wrapped object raise ``error``, on behalf of ``by``."""
        self._store.end_waits(error, by)

    def hang_up(self) -> None:
        """Hang up the wrapped store."""
        self._store.hang_up()

    def close(self) -> None:
        """Close the wrapped store."""
        self._store.close()

    def describe(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store.describe()})"

    @property
    def in_one_process(self) -> bool:
        return self._store.in_one_process

    def in_process(self, key: str, factory: Callable[[], T]) -> T:
        return self._store.in_process(self._key(key), factory)

    def _key(self, key: str) -> str:
        to_key(key)
        return f"{self._prefix}/{key}"

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._key(key) for key in list_keys(keys)]
