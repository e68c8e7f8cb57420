"""The store: a small key-value service through which ranks find each other.

Keys are ``str``, values ``bytes``. The names and their meaning are c10d's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from datetime import timedelta
from typing import TypeVar

from transport.checks import to_whole_number
from transport.deadline import Deadline, Timeout, to_seconds
from transport.errors import DistError, DistStoreError, StoreTimeoutError

DEFAULT_STORE_TIMEOUT = 300.0
Value = bytes | bytearray | memoryview | str
T = TypeVar("T")


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


def list_keys(keys: Sequence[str]) -> list[str]:
    """Return ``keys`` as a list; raise TypeError for one ``str`` and for what is no sequence."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"keys must be a list of str, got the {type(keys).__name__} {keys!r}")
    return list(keys)


def to_keys(keys: Sequence[str]) -> list[bytes]:
    """Return ``keys`` as they are stored; raise TypeError unless it is a sequence of ``str``."""
    return [to_key(key) for key in list_keys(keys)]


def to_values(values: Sequence[Value]) -> list[bytes]:
    """Return ``values`` as bytes; raise TypeError unless it is a sequence of them."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"values must be a list of bytes or str, got the {type(values).__name__} {values!r}"
        )
    return [to_bytes(value, f"values[{i}]") for i, value in enumerate(values)]


def to_pairs(keys: Sequence[str], values: Sequence[Value]) -> list[tuple[bytes, bytes]]:
    """Return what ``multi_set`` writes; raise ValueError unless both have one length."""
    stored, data = to_keys(keys), to_values(values)
    if len(stored) != len(data):
        raise ValueError(
            f"keys and values must have the same length, got {len(stored)} and {len(data)}"
        )
    return list(zip(stored, data, strict=True))


def check_offset(offset: int) -> int:
    """Return ``offset`` when it is one; raise ValueError otherwise, TypeError for no number."""
    if to_whole_number(offset, "offset") < 0:
        raise ValueError(f"offset must be >= 0, got {offset}")
    return offset


def key_name(key: bytes) -> str:
    """Return the name behind a stored key, for messages."""
    return key.decode("utf-8", "backslashreplace")


def timeout_error(
    store: str, what: str, missing: Sequence[bytes], seconds: float
) -> StoreTimeoutError:
    """Return the error for a wait in ``store`` for ``what`` of the keys that are ``missing``."""
    shown = ", ".join(repr(key_name(key)) for key in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return StoreTimeoutError(f"{store}: waited {seconds:g} s for {what} {shown}{more}")


class Store(ABC):
    """A key-value store shared by the ranks of a job.

    Keys are ``str``; values ``bytes``, or ``str``, of which the UTF-8 is kept. All methods may be
    called from several threads. A blocking method ends by its own ``timeout`` (seconds or a
    timedelta), else the store's, with a ``StoreTimeoutError`` that names the keys that did not
    come and the store. Methods raise ``DistStoreError`` when the store cannot be reached or is
    closed, TypeError and ValueError for arguments.
    """

    def __init__(self, timeout: Timeout = DEFAULT_STORE_TIMEOUT) -> None:
        self._timeout = to_seconds(timeout)
        self._ends: dict[object, DistError] = {}
        self._last_end: DistError | None = None

    @property
    def timeout(self) -> timedelta:
        """The longest that a blocking method of this store waits, unless it is told otherwise."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the longest that a blocking method of this store waits: seconds or a timedelta."""
        self._timeout = to_seconds(timeout)

    def _seconds(self, timeout: Timeout | None) -> float:
        """Return how long a call waits that was given ``timeout``."""
        return self._timeout if timeout is None else to_seconds(timeout)

    @property
    def serves(self) -> bool:
        """Whether other ranks' stores end when this one is closed."""
        return False

    @abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Write ``value`` under ``key``, over whatever was there."""

    @abstractmethod
    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Wait until ``key`` exists and return its value."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter under ``key`` (0 when missing); return the new value.

        The counter is kept as decimal text. Raises ``DistStoreError`` when the value is none.
        """

    @abstractmethod
    def append(self, key: str, value: Value) -> None:
        """Add ``value`` behind the value of ``key``; create it when missing."""

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all ``keys`` exist."""

    @abstractmethod
    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Write ``desired_value`` if ``key`` holds ``expected_value``, or is missing and
        ``expected_value`` is empty. Return the value under ``key`` afterwards
        (``expected_value`` when the key is still missing).
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it was there."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all ``keys`` exist and return their values."""

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Write several ``keys`` at once, each with its own of the ``values``.

        Raises ValueError when the lengths differ.
        """

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys in the store."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """Return all keys, sorted. Queues have names of their own, which are not among them."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all ``keys`` exist."""

    def has_extended_api(self) -> bool:
        """Return True: every store has ``append``, ``multi_get``, ``multi_set`` and queues."""
        return True

    @abstractmethod
    def queue_push(self, key: str, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``."""

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Take the first value of the queue ``key``, waiting for one when ``block``.

        Raises ``DistStoreError`` when it is empty and ``block`` is false. ``timeout`` bounds the
        wait alone.
        """

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue ``key``."""

    @abstractmethod
    def tail(self, key: str, offset: int, timeout: Timeout | None = None) -> bytes:
        """Wait until the value of ``key`` is longer than ``offset`` bytes; return what is behind.

        With ``append`` this makes a key a log that every rank can follow.
        """

    @abstractmethod
    def set_will(self, key: str, value: Value) -> bool:
        """Have ``value`` appended to ``key`` when this client is gone without ``close``.

        Return False where the store has nobody to notice. One will a client: the last one holds.
        """

    def with_patience(self, seconds: float) -> Store:
        """Return this store for whoever cannot wait for a server that is silent.

        Its calls raise ``DistStoreError`` when the server is late by more than ``seconds`` with its
        answer (that nothing came is owed at a wait's own timeout). It is no clone: one closes the
        object that it was made from.
        """
        del seconds
        return self

    @abstractmethod
    def clone(self) -> Store:
        """Return a store over the same data that blocks independently of this one.

        A wait on one never delays a call on the other (a TCP client gets its own connection).
        """

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        """Have the waits on this object that are under way, and later ones for what is not there,
        raise ``error``: whoever should write it is known to be gone. None: wait again.

        Ranks that are threads may share the object: each takes back, as the hashable ``by``, only
        what it said itself. Any thread. Clones, and other users of the data, are not concerned.
        """
        if error is None:
            self._ends.pop(by, None)
        else:
            self._ends[by] = self._last_end = error

    def _waited_in_vain(self, what: str, missing: Sequence[bytes], deadline: Deadline) -> DistError:
        """Return the error of a wait that has ended without what it waited for."""
        # One that ended early was ended, though whoever did so may have taken it back since.
        if self._last_end is not None and (self._ends or not deadline.expired):
            # A copy, because each thread that raises it adds a traceback of its own.
            return copy(self._last_end)
        return timeout_error(self.describe(), what, missing, deadline.seconds)

    def hang_up(self) -> None:
        """Have this object's waits under way, and all its later calls, end with ``DistStoreError``,
        without a word to whoever serves. Any thread; never blocks. ``close`` is still due.
        """
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and files; waits under way end with ``DistStoreError``."""

    @abstractmethod
    def describe(self) -> str:
        """Return what a person calls this store, for messages: ``TCPStore(host:port)``."""

    @property
    def in_one_process(self) -> bool:
        """Whether all users of the data are threads of this process: ``in_process`` is for them."""
        return False

    def in_process(self, key: str, factory: Callable[[], T]) -> T:
        """Return the one object that all users of this store in this process share under ``key``.

        ``factory()`` makes it when there is none. Only a store that lives in one process has such;
        the others raise ``DistStoreError``.
        """
        raise DistStoreError(
            f"{self.describe()} cannot share {key!r} inside a process; expected a HashStore"
        )

    def __repr__(self) -> str:
        return self.describe()
