"""The store: a small key-value service through which ranks find each other.

Keys are ``str``, values ``bytes``. The names and their meaning are c10d's. ``Store`` is the part
that all stores share: it turns methods into commands (``transport._store.commands``), and a
subclass carries them out.
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

    Keys are ``str``; values ``bytes``, or ``str``, of which the UTF-8 is kept. All methods may be
    called from several threads. A blocking method ends by its own ``timeout`` (seconds or a
    timedelta), else the store's. It then raises a ``StoreTimeoutError`` that names the store and
    the missing keys. Methods raise ``DistStoreError`` when the store cannot be reached or is
    closed, TypeError and ValueError for wrong arguments.
    """

    def __init__(self, timeout: Timeout = DEFAULT_STORE_TIMEOUT) -> None:
        self._timeout = to_seconds(timeout)
        # Errors that end all waits now, by the party that set them (``end_waits``), and the last
        # one set. Shared by all objects that are the same store (``with_grace``).
        self._ends: dict[object, DistError] = {}
        self._last_end: list[DistError] = []

    # Implemented by each kind of store.

    @abstractmethod
    def _request(self, op: Op, fields: Fields) -> Fields:
        """Return the answer to a command that has one at once."""

    @abstractmethod
    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        """Return the answer to a command, waiting for it if necessary.

        Raises the error of ``_waited_in_vain`` at the deadline.
        """

    def _key(self, key: str) -> bytes:
        """Return ``key`` as commands have it; raise TypeError unless it is a ``str``."""
        return to_key(key)

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self._key(key) for key in list_keys(keys)]

    def _post(self, op: Op, fields: Fields) -> None:
        """Carry out a command without waiting for its answer, before all later ones of this client.

        If it fails, the next command raises.
        """
        self._request(op, fields)

    def _will(self, key: bytes, value: bytes) -> bool:
        """Register the will; return False if no server can notice the loss of this client."""
        del key, value
        return False

    def _seconds(self, timeout: Timeout | None) -> float:
        """Return the seconds that a call waits when given ``timeout``."""
        return self._timeout if timeout is None else to_seconds(timeout)

    def _waited_in_vain(self, op: Op, missing: Sequence[bytes], deadline: Deadline) -> DistError:
        """Return the error of a wait that ended while the keys ``missing`` do not exist."""
        # A wait that ended before its deadline was ended by ``end_waits``, even if that was taken
        # back since.
        if self._last_end and (self._ends or not deadline.expired):
            # A copy, because each thread that raises it adds a traceback of its own.
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
        ``once``, keep a value that is already there.

        It takes effect before any later call on this object. If the server cannot be reached, the
        later call raises.
        """
        if once:
            self._post(Op.COMPARE_SET, (self._key(key), b"", to_bytes(value)))
        else:
            self._post(Op.SET, (self._key(key), to_bytes(value)))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Wait until ``key`` exists and return its value."""
        return self._await(Op.GET, (self._key(key),), timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter under ``key`` (0 when missing); return the new value.

        The counter is kept as decimal text. Raises ``DistStoreError`` when the value is none.
        """
        number = to_whole_number(amount, "amount")
        return int(self._request(Op.ADD, (self._key(key), b"%d" % number))[0])

    def append(self, key: str, value: Value) -> None:
        """Append ``value`` to the value of ``key``; create the key when missing."""
        self._request(Op.APPEND, (self._key(key), to_bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all ``keys`` exist."""
        return self._request(Op.CHECK, self._keys(keys))[0] == b"1"

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Write ``desired_value`` if ``key`` holds ``expected_value``, or is missing and
        ``expected_value`` is empty. Return the value under ``key`` afterwards
        (``expected_value`` when the key is still missing).
        """
        expected = to_bytes(expected_value, "expected_value")
        desired = to_bytes(desired_value, "desired_value")
        return self._request(Op.COMPARE_SET, (self._key(key), expected, desired))[0]

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it was there."""
        return self._request(Op.DELETE, (self._key(key),))[0] == b"1"

    def multi_get(self, keys: Sequence[str], timeout: Timeout | None = None) -> list[bytes]:
        """Wait until all ``keys`` exist and return their values."""
        return list(self._await(Op.MULTI_GET, self._keys(keys), timeout))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Write several ``keys`` at once, each with its own of the ``values``.

        Raises ValueError when the lengths differ.
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
        """Return all keys, sorted. Queues have names of their own, which are not among them."""
        return [from_key(key) for key in self._request(Op.LIST_KEYS, ())]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all ``keys`` exist."""
        self._await(Op.WAIT, self._keys(keys), timeout)

    def tail(self, key: str, offset: int, timeout: Timeout | None = None) -> bytes:
        """Wait until the value of ``key`` is longer than ``offset`` bytes; return the bytes from
        there.

        With ``append`` this makes a key a log that every rank can follow.
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
        """Take the first value of the queue ``key``, waiting for one when ``block``.

        Raises ``DistStoreError`` when it is empty and ``block`` is false. ``timeout`` bounds the
        wait alone.
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
        """The longest that a blocking method of this store waits, unless it is told otherwise."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the longest that a blocking method of this store waits: seconds or a timedelta."""
        self._timeout = to_seconds(timeout)

    @property
    def serves(self) -> bool:
        """True if other ranks' stores end when this one is closed."""
        return False

    @property
    def address(self) -> tuple[str, int] | None:
        """The host and the port at which the store is reached; None: not over the network."""
        return None

    def set_will(self, key: str, value: Value) -> bool:
        """Have the server append ``value`` to ``key`` if this client disappears without ``close``.

        Return False for stores without a server of ours. A TCPStore's server notices within
        milliseconds. A client has one will; a later one replaces it.
        """
        return self._will(self._key(key), to_bytes(value))

    def with_grace(self, seconds: float) -> Store:
        """Return this store for callers that cannot wait for a silent server.

        Its calls raise ``DistStoreError`` when the server's answer is late by more than
        ``seconds``. (A wait's answer is due at the wait's own timeout.) It is not a clone: close
        only the original object.
        """
        del seconds
        return self

    @abstractmethod
    def clone(self) -> Store:
        """Return a store over the same data that blocks independently of this one.

        A wait on one never delays a call on the other (a TCP client gets its own connection).
        """

    def aside(self) -> Store:
        """Return a store over the same data whose ``hang_up`` ends its own waits alone.

        It is cheaper than a ``clone``, which costs round trips to a server. Close it like a clone.
        Waits under way also end when the original object is closed.
        """
        return self.clone()

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        """Make waits for missing keys on this object raise ``error``, those under way and later
        ones.

        Used when the writer is known to be lost. None lifts it again. Thread-safe.

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
        """End this object's waits under way, and all later calls, with ``DistStoreError``.

        It sends nothing to the server. Thread-safe; never blocks. Call ``close`` afterwards.
        """
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close connections and files; waits under way end with ``DistStoreError``."""

    @abstractmethod
    def describe(self) -> str:
        """Return the store's name for messages: ``TCPStore(host:port)``."""

    @property
    def in_one_process(self) -> bool:
        """True if all users of the data are threads of this process: ``in_process`` is for them."""
        return False

    def in_process(self, key: str, factory: Callable[[], T]) -> T:
        """Return the one object that all users of this store in this process share under ``key``.

        ``factory()`` makes it when missing. Only a store that lives in one process has such
        objects; the others raise ``DistStoreError``.
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
