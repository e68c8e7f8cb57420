"""The store: a small key-value service through which ranks find each other.

The methods are c10d's. ``Store`` is the base of all stores. It turns methods into commands
(``transport._store.commands``), which its subclasses execute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from typing import Self, TypeVar

from transport._checks import to_whole_number
from transport._errors import DistError, DistStoreError, QueueEmptyError, StoreTimeoutError
from transport._store.arguments import (
    Value,
    from_key,
    key_name,
    list_keys,
    list_values,
    to_bytes,
    to_key,
    to_offset,
)
from transport._store.commands import Fields, Op, wanted
from transport._store.fields import pack_number
from transport._waiting.deadline import Deadline, Timeout, to_seconds

DEFAULT_STORE_TIMEOUT = 300.0
T = TypeVar("T")


class Store(ABC):
    """A key-value store shared by the ranks of a job.

    Keys are ``str``. Values are ``bytes``; a ``str`` is stored as UTF-8. All methods are
    thread-safe. A blocking method waits for its ``timeout`` (seconds or a timedelta), by default
    the store's. Then it raises a ``StoreTimeoutError`` that names the store and the missing keys.
    Methods raise ``DistStoreError`` if the store cannot be reached or is closed, TypeError and
    ValueError for wrong arguments.
    """

    def __init__(self, timeout: Timeout = DEFAULT_STORE_TIMEOUT) -> None:
        self._timeout = to_seconds(timeout)
        # The errors that end all waits, by their setters (``end_waits``), and the last one.
        # Shared with the copies that ``with_grace`` returns.
        self._ends: dict[object, DistError] = {}
        self._last_end: list[DistError] = []

    # Implemented by each kind of store.

    @abstractmethod
    def _request(self, op: Op, fields: Fields) -> Fields:
        """Return the answer to a command that never waits."""

    @abstractmethod
    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        """Return the answer to a command, waiting for it if necessary.

        Raises the error of ``_wait_error`` at the deadline.
        """

    def _key(self, key: str) -> bytes:
        """Return ``key`` as a field of commands; raise TypeError unless it is a ``str``."""
        return to_key(key)

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self._key(key) for key in list_keys(keys)]

    def _post(self, op: Op, fields: Fields) -> None:
        """Send a command without waiting for its answer.

        It takes effect before all later commands of this client. If it fails, the next command
        raises.
        """
        self._request(op, fields)

    def _will(self, key: bytes, value: bytes) -> bool:
        """Register the will; return False if no server can notice the loss of this client."""
        del key, value
        return False

    def _seconds(self, timeout: Timeout | None) -> float:
        """Return ``timeout`` in seconds, by default the store's."""
        return self._timeout if timeout is None else to_seconds(timeout)

    def _wait_error(self, op: Op, missing: Sequence[bytes], deadline: Deadline) -> DistError:
        """Return the error of a wait that ended without the keys ``missing``."""
        # A wait that ended before its deadline was ended by ``end_waits``, even if that error was
        # lifted since.
        if self._last_end and (self._ends or not deadline.expired):
            # A copy, because each raising thread adds its own traceback.
            return copy(self._last_end[0])
        shown = ", ".join(repr(key_name(key)) for key in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return StoreTimeoutError(
            f"{self.describe()}: waited {deadline.seconds:g} s for {wanted(op)} {shown}{more}",
            list(map(key_name, missing)),
        )

    # Values.

    def set(self, key: str, value: Value) -> None:
        """Write ``value`` under ``key``, replacing an earlier value."""
        self._request(Op.SET, (self._key(key), to_bytes(value)))

    def post(self, key: str, value: Value, *, once: bool = False) -> None:
        """Write ``value`` under ``key`` like ``set``, without waiting for the server. With
        ``once``, do not replace an existing value.

        The write takes effect before any later call on this object. If the server cannot be
        reached, the later call raises.
        """
        if once:
            self._post(Op.COMPARE_SET, (self._key(key), b"", to_bytes(value)))
        else:
            self._post(Op.SET, (self._key(key), to_bytes(value)))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Wait until ``key`` exists and return its value."""
        return self._await(Op.GET, (self._key(key),), timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter under ``key`` (0 if missing); return the new value.

        The counter is stored as decimal text. Raises ``DistStoreError`` if the value is not one.
        """
        number = to_whole_number(amount, "amount")
        return int(self._request(Op.ADD, (self._key(key), b"%d" % number))[0])

    def append(self, key: str, value: Value) -> None:
        """Append ``value`` to the value of ``key``; create the key if missing."""
        self._request(Op.APPEND, (self._key(key), to_bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all ``keys`` exist."""
        return self._request(Op.CHECK, self._keys(keys))[0] == b"1"

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Write ``desired_value`` if ``key`` holds ``expected_value``, or is missing and
        ``expected_value`` is empty. Return the value under ``key`` afterwards
        (``expected_value`` if the key is still missing).
        """
        expected = to_bytes(expected_value, "expected_value")
        desired = to_bytes(desired_value, "desired_value")
        return self._request(Op.COMPARE_SET, (self._key(key), expected, desired))[0]

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it existed."""
        return self._request(Op.DELETE, (self._key(key),))[0] == b"1"

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Wait until all ``keys`` exist and return their values."""
        return list(self._await(Op.MULTI_GET, self._keys(keys), timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Write each of ``values`` under the key at the same position, all at once.

        Raises ValueError if the lengths differ.
        """
        stored, data = self._keys(keys), list_values(values)
        if len(stored) != len(data):
            raise ValueError(
                f"keys and values must have the same length, got {len(stored)} and {len(data)}"
            )
        pairs = zip(stored, data, strict=True)
        self._request(Op.MULTI_SET, [field for pair in pairs for field in pair])

    def num_keys(self) -> int:
        """Return the number of keys that users have set, whatever their prefix."""
        return int(self._request(Op.NUM_KEYS, ())[0])

    def list_keys(self) -> list[str]:
        """Return all keys, sorted, without the names of queues."""
        return [from_key(key) for key in self._request(Op.LIST_KEYS, ())]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all ``keys`` exist."""
        self._await(Op.WAIT, self._keys(keys), timeout)

    def tail(self, key: str, offset: int, timeout: Timeout | None = None) -> bytes:
        """Wait until the value of ``key`` is longer than ``offset`` bytes; return the bytes from
        ``offset`` on.

        Together with ``append``, this makes a key a log that every rank can follow.
        """
        fields = self._key(key), pack_number(to_offset(offset))
        return self._await(Op.TAIL, fields, timeout)[0]

    # Queues.

    def has_extended_api(self) -> bool:
        """Return True: every store has ``append``, ``multi_get``, ``multi_set`` and queues."""
        return True

    def queue_push(self, key: str, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._request(Op.PUSH, (self._key(key), to_bytes(value)))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Remove and return the first value of the queue ``key``, waiting for one if ``block``.

        Raises ``DistStoreError`` if the queue is empty and ``block`` is false. ``timeout`` only
        bounds the wait.
        """
        fields = (self._key(key),)
        if block:
            return self._await(Op.POP, fields, timeout)[0]
        found = self._request(Op.TRY_POP, fields)
        if not found:
            raise QueueEmptyError(f"{self.describe()}: queue {key!r} is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue ``key``."""
        return int(self._request(Op.QUEUE_LEN, (self._key(key),))[0])

    # The client.

    @property
    def timeout(self) -> timedelta:
        """The default timeout of blocking methods."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of blocking methods: seconds or a timedelta."""
        self._timeout = to_seconds(timeout)

    @property
    def serves(self) -> bool:
        """True if other ranks' stores end when this one is closed."""
        return False

    @property
    def address(self) -> tuple[str, int] | None:
        """The host and the port of the store; None if it is not on the network."""
        return None

    def set_will(self, key: str, value: Value) -> bool:
        """Let the server append ``value`` to ``key`` if this client disappears without ``close``.

        Return False for stores without a meshlib server. A TCPStore's server notices the loss
        within milliseconds. A client has one will; a later one replaces it.
        """
        return self._will(self._key(key), to_bytes(value))

    def with_grace(self, seconds: float) -> Store:
        """Return this store for callers that cannot wait for a silent server.

        Its calls raise ``DistStoreError`` if the server's answer is late by more than ``seconds``;
        the answer to a wait is late only after the wait's timeout. The result is not a clone:
        close only the original object.
        """
        del seconds
        return self

    @abstractmethod
    def clone(self) -> Store:
        """Return an independent store over the same data (a TCP client gets its own connection).

        A wait on one does not delay a call on the other.
        """

    def aside(self) -> Store:
        """Return a store over the same data whose ``hang_up`` ends only its own waits.

        It is cheaper than a ``clone``, which costs round trips to a server. Close it like a clone.
        Its waits also end when the original object is closed.
        """
        return self.clone()

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        """Make current and later waits for missing keys on this object raise ``error``.

        Used when the writer is known to be lost. None lifts the error again. Thread-safe.

        Ranks that are threads may share the object: each lifts only the error that it set as the
        hashable ``by``. Clones, stores made by ``aside``, and other users of the data are not
        affected.
        """
        if error is None:
            self._ends.pop(by, None)
        else:
            self._ends[by] = error
            self._last_end[:] = [error]

    def hang_up(self) -> None:
        """Make this object's current waits and all later calls raise ``DistStoreError``.

        Sends nothing to the server. Thread-safe; never blocks. Call ``close`` afterwards.
        """
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close connections and files; current waits raise ``DistStoreError``."""

    @abstractmethod
    def describe(self) -> str:
        """Return the store's name for messages: ``TCPStore(host:port)``."""

    @property
    def in_one_process(self) -> bool:
        """True if all users of the data are threads of this process, and ``in_process`` works."""
        return False

    def in_process(self, key: str, factory: Callable[[], T]) -> T:
        """Return the one object that all users of this store in this process share under ``key``.

        If missing, ``factory()`` makes it. Stores that several processes can use raise
        ``DistStoreError``.
        """
        raise DistStoreError(
            f"{self.describe()} cannot share {key!r} inside a process; expected a HashStore"
        )

    def __repr__(self) -> str:
        return self.describe()

    def __enter__(self) -> Self:
        """Return the store itself, which the end of the block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()
