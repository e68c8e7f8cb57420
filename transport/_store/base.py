"""The store: a small key-value service through which ranks find each other.

Keys are ``str``, values ``bytes``. The names and their meaning are c10d's. Here is what all stores
have in common; what is behind one only carries out commands (``transport._store.commands``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from typing import Self, TypeVar

from transport._checks import to_whole_number
from transport._deadline import Deadline, Timeout, to_seconds
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

DEFAULT_STORE_TIMEOUT = 300.0
T = TypeVar("T")


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
        # What ends waits now, by who said so, and what did last: of this object and all that are
        # the same store (``with_patience``).
        self._ends: dict[object, DistError] = {}
        self._last_end: list[DistError] = []

    # What is behind the store.

    @abstractmethod
    def _ask(self, op: Op, fields: Fields) -> Fields:
        """Return the answer to a command that has one at once."""

    @abstractmethod
    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        """Return the answer to a command that may have to wait for one.

        Raises what ``_waited_in_vain`` returns when it has not come in time.
        """

    def _key(self, key: str) -> bytes:
        """Return ``key`` as commands have it; raise TypeError unless it is a ``str``."""
        return to_key(key)

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self._key(key) for key in list_keys(keys)]

    def _tell(self, op: Op, fields: Fields) -> None:
        """Carry out a command whose answer nobody waits for, before all later ones of this client.

        That it could not be carried out is an error of the next one.
        """
        self._ask(op, fields)

    def _will(self, key: bytes, value: bytes) -> bool:
        """Take the will, if there is somebody to notice that this client is gone."""
        del key, value
        return False

    def _seconds(self, timeout: Timeout | None) -> float:
        """Return how long a call waits that was given ``timeout``."""
        return self._timeout if timeout is None else to_seconds(timeout)

    def _waited_in_vain(self, op: Op, missing: Sequence[bytes], deadline: Deadline) -> DistError:
        """Return the error of a wait that has ended without the keys that are ``missing``."""
        # One that ended early was ended, though whoever did so may have taken it back since.
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
        """Write ``value`` under ``key``, over whatever was there."""
        self._ask(Op.SET, (self._key(key), to_bytes(value)))

    def post(self, key: str, value: Value, *, once: bool = False) -> None:
        """Write ``value`` under ``key`` like ``set``, without waiting until that is done; ``once``:
        unless there is something already.

        It is done before any later call on this object; a server that cannot be reached is an error
        of that call.
        """
        if once:
            self._tell(Op.COMPARE_SET, (self._key(key), b"", to_bytes(value)))
        else:
            self._tell(Op.SET, (self._key(key), to_bytes(value)))

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        """Wait until ``key`` exists and return its value."""
        return self._await(Op.GET, (self._key(key),), timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the counter under ``key`` (0 when missing); return the new value.

        The counter is kept as decimal text. Raises ``DistStoreError`` when the value is none.
        """
        number = to_whole_number(amount, "amount")
        return int(self._ask(Op.ADD, (self._key(key), b"%d" % number))[0])

    def append(self, key: str, value: Value) -> None:
        """Add ``value`` behind the value of ``key``; create it when missing."""
        self._ask(Op.APPEND, (self._key(key), to_bytes(value)))

    def check(self, keys: Sequence[str]) -> bool:
        """Return at once whether all ``keys`` exist."""
        return self._ask(Op.CHECK, self._keys(keys))[0] == b"1"

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Write ``desired_value`` if ``key`` holds ``expected_value``, or is missing and
        ``expected_value`` is empty. Return the value under ``key`` afterwards
        (``expected_value`` when the key is still missing).
        """
        expected = to_bytes(expected_value, "expected_value")
        desired = to_bytes(desired_value, "desired_value")
        return self._ask(Op.COMPARE_SET, (self._key(key), expected, desired))[0]

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it was there."""
        return self._ask(Op.DELETE, (self._key(key),))[0] == b"1"

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
        self._ask(Op.MULTI_SET, [field for pair in pairs for field in pair])

    def num_keys(self) -> int:
        """Return the number of keys that users have set, whatever their prefix."""
        return int(self._ask(Op.NUM_KEYS, ())[0])

    def list_keys(self) -> list[str]:
        """Return all keys, sorted. Queues have names of their own, which are not among them."""
        return [from_key(key) for key in self._ask(Op.LIST_KEYS, ())]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all ``keys`` exist."""
        self._await(Op.WAIT, self._keys(keys), timeout)

    def tail(self, key: str, offset: int, timeout: Timeout | None = None) -> bytes:
        """Wait until the value of ``key`` is longer than ``offset`` bytes; return what is behind.

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
        self._ask(Op.PUSH, (self._key(key), to_bytes(value)))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        """Take the first value of the queue ``key``, waiting for one when ``block``.

        Raises ``DistStoreError`` when it is empty and ``block`` is false. ``timeout`` bounds the
        wait alone.
        """
        fields = (self._key(key),)
        if block:
            return self._await(Op.POP, fields, timeout)[0]
        found = self._ask(Op.TRY_POP, fields)
        if not found:
            raise QueueEmptyError(f"{self.describe()}: queue {key!r} is empty")
        return found[0]

    def queue_len(self, key: str) -> int:
        """Return the number of values in the queue ``key``."""
        return int(self._ask(Op.QUEUE_LEN, (self._key(key),))[0])

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
        """Whether other ranks' stores end when this one is closed."""
        return False

    def set_will(self, key: str, value: Value) -> bool:
        """Have ``value`` appended to ``key`` when this client is gone without ``close``.

        Return False where the store has nobody to notice: in one process, and in a file. A
        TCPStore's server notices within milliseconds. One will a client: the last one holds.
        """
        return self._will(self._key(key), to_bytes(value))

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

    def aside(self) -> Store:
        """Return a store over the same data whose ``hang_up`` ends its own waits alone.

        Like a ``clone``, which costs some round trips to a server and this does not. To be closed,
        like a clone; waits under way when the object that it was made from is closed end with it.
        """
        return self.clone()

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        """Have the waits on this object that are under way, and later ones for what is not there,
        raise ``error``: whoever should write it is known to be gone. None: wait again.

        Ranks that are threads may share the object: each takes back, as the hashable ``by``, only
        what it said itself. Any thread. Clones, what it has ``aside``, and other users of the data
        are not concerned.
        """
        if error is None:
            self._ends.pop(by, None)
        else:
            self._ends[by] = error
            self._last_end[:] = [error]

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

    def __enter__(self) -> Self:
        """Return the store itself, which the end of the block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()
