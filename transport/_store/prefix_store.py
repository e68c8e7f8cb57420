"""A namespace inside another store."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from transport._errors import DistError
from transport._store.arguments import from_key, to_key
from transport._store.base import Store
from transport._store.commands import Fields, Op
from transport._waiting.deadline import Timeout

T = TypeVar("T")


def underlying(store: Any) -> Any:
    """Return the innermost store of a ``store`` with prefixes. Other libraries' stores work too."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


class PrefixStore(Store):
    """Wraps ``store`` and puts ``prefix/`` before every key.

    The timeout and ``num_keys`` (keys of all prefixes) are those of the wrapped store. ``close``
    closes the wrapped store: close a ``clone``, or make sure that no other user shares the store.
    Raises TypeError if ``prefix`` is not a ``str`` or ``store`` not a ``Store``.
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
        """The wrapped store."""
        return self._store

    @property
    def prefix(self) -> str:
        """The prefix of every key, without its slash."""
        return self._prefix

    # The prefix.

    def _key(self, key: str) -> bytes:
        to_key(key)
        return self._store._key(f"{self._prefix}/{key}")

    def list_keys(self) -> list[str]:
        """Return the keys under this prefix, without it, sorted."""
        start = self._key("")
        keys = self._request(Op.LIST_KEYS, ())
        return [from_key(key[len(start) :]) for key in keys if key.startswith(start)]

    def in_process(self, key: str, factory: Callable[[], T]) -> T:
        """Return the wrapped store's object under the prefixed key; if missing, ``factory()``
        makes it.
        """
        return self._store.in_process(f"{self._prefix}/{key}", factory)

    def with_grace(self, seconds: float) -> PrefixStore:
        """Return the same prefix over the wrapped store ``with_grace(seconds)``."""
        return PrefixStore(self._prefix, self._store.with_grace(seconds))

    def clone(self) -> PrefixStore:
        """Return a store with the same prefix over a clone of the wrapped store."""
        return PrefixStore(self._prefix, self._store.clone())

    def aside(self) -> PrefixStore:
        """Return the same prefix over the wrapped store's ``aside()``."""
        return PrefixStore(self._prefix, self._store.aside())

    def describe(self) -> str:
        """Return the name for messages: the prefix and the wrapped store."""
        return f"PrefixStore({self._prefix!r}, {self._store.describe()})"

    # Everything else goes to the wrapped store.

    def _request(self, op: Op, fields: Fields) -> Fields:
        return self._store._request(op, fields)

    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        return self._store._await(op, fields, timeout)

    def _post(self, op: Op, fields: Fields) -> None:
        self._store._post(op, fields)

    def _will(self, key: bytes, value: bytes) -> bool:
        return self._store._will(key, value)

    @property
    def serves(self) -> bool:
        """True if other ranks' stores end when the wrapped store is closed."""
        return self._store.serves

    @property
    def in_one_process(self) -> bool:
        """True if all users of the wrapped store's data are threads of this process."""
        return self._store.in_one_process

    @property
    def timeout(self) -> timedelta:
        """The wrapped store's timeout."""
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the wrapped store's timeout: seconds or a timedelta."""
        self._store.set_timeout(timeout)

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        """Make the waits of all users of the wrapped object raise ``error``, set by ``by``."""
        self._store.end_waits(error, by)

    def hang_up(self) -> None:
        """Make the wrapped store's current waits and later calls raise."""
        self._store.hang_up()

    def close(self) -> None:
        """Close the wrapped store."""
        self._store.close()
