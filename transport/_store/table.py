"""The data of a store and its waiters, without threads, locks, input or output.

A ``HashStore`` guards its table with a lock, a server uses one in its event loop, and a
``FileStore`` has one as its copy of the file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from transport._errors import DistStoreError
from transport._store.arguments import key_name


class StoreTable:
    """Keys with values, queues, and waiters. Keys are bytes here.

    Keys and queues have separate namespaces.
    """

    def __init__(self) -> None:
        # A value that grows by append is a bytearray: n appends cost O(n).
        self._values: dict[bytes, bytes | bytearray] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting_for_value: dict[bytes, dict[Waiter, None]] = {}
        self._waiting_for_queue: dict[bytes, dict[Waiter, None]] = {}
        self.changes = 0
        """The number of writes and removals so far."""

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> list[bytes]:
        """Return all keys, sorted."""
        return sorted(self._values)

    def set(self, key: bytes, value: bytes) -> None:
        """Write ``value`` under ``key``."""
        self.changes += 1
        self._values[key] = value
        if key in self._waiting_for_value:
            self._wake(self._waiting_for_value, key)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of ``key``, or None if it is missing."""
        value = self._values.get(key)
        return bytes(value) if isinstance(value, bytearray) else value

    def size(self, key: bytes) -> int:
        """Return the length of the value of ``key``, 0 if it is missing."""
        return len(self._values.get(key, b""))

    def get_from(self, key: bytes, offset: int) -> bytes:
        """Return the value of ``key`` from ``offset`` on."""
        return bytes(self._values.get(key, b"")[offset:])

    def missing(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the ``keys`` that do not exist."""
        return [key for key in keys if key not in self._values]

    def first_missing(self, keys: Sequence[bytes], begin: int) -> int:
        """Return the index of the first of ``keys[begin:]`` that is missing, or ``len(keys)``."""
        values = self._values
        for index in range(begin, len(keys)):
            if keys[index] not in values:
                return index
        return len(keys)

    def add(self, key: bytes, amount: int) -> int:
        """Add to a counter; raise DistStoreError if the value of ``key`` is not a number."""
        text = self._values.get(key, b"0")
        try:
            total = int(text) + amount
        except ValueError:
            raise DistStoreError(
                f"key {key_name(key)!r} holds {bytes(text[:40])!r}, which is not a number;"
                " add needs a counter"
            ) from None
        self.set(key, b"%d" % total)
        return total

    def append(self, key: bytes, value: bytes) -> None:
        """Append ``value`` to the value of ``key``."""
        held = self._values.get(key)
        if held is None:
            self.set(key, value)
            return
        if not isinstance(held, bytearray):
            held = self._values[key] = bytearray(held)
        held += value
        self.changes += 1
        if key in self._waiting_for_value:
            self._wake(self._waiting_for_value, key)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Replace ``expected`` by ``desired``; see ``Store.compare_set``."""
        held = self.get(key)
        if held is None and expected:
            return expected
        if held is None or held == expected:
            self.set(key, desired)
            return desired
        return held

    def delete(self, key: bytes) -> bool:
        """Delete ``key``; return whether it existed."""
        if self._values.pop(key, None) is None:
            return False
        self.changes += 1
        return True

    def push(self, key: bytes, value: bytes) -> None:
        """Put ``value`` at the end of the queue ``key``."""
        self._queues.setdefault(key, deque()).append(value)
        self.changes += 1
        if key in self._waiting_for_queue:
            self._wake(self._waiting_for_queue, key)

    def pop(self, key: bytes) -> bytes | None:
        """Remove and return the first value of the queue ``key``, None if it is empty."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        value = queue.popleft()
        self.changes += 1
        if not queue:
            del self._queues[key]
        return value

    def queue_len(self, key: bytes) -> int:
        """Return the number of values in the queue ``key``."""
        return len(self._queues.get(key, ()))

    def submit(self, waiter: Waiter) -> bool:
        """Complete ``waiter`` now and return True, or hold it until it can be completed."""
        key = waiter.advance(self)
        if key is None:
            waiter.parked_at = None
            waiter.deliver(waiter)
            return True
        where = self._waiting_for_queue if waiter.wants_queue else self._waiting_for_value
        where.setdefault(key, {})[waiter] = None
        waiter.parked_at = key
        return False

    def withdraw(self, waiter: Waiter) -> bool:
        """Remove ``waiter``; return whether it was still waiting."""
        key = waiter.parked_at
        if key is None:
            return False
        where = self._waiting_for_queue if waiter.wants_queue else self._waiting_for_value
        waiters = where[key]
        del waiters[waiter]
        if not waiters:
            del where[key]
        waiter.parked_at = None
        return True

    def _wake(self, where: dict[bytes, dict[Waiter, None]], key: bytes) -> None:
        for waiter in where.pop(key):
            self.submit(waiter)


class Waiter(ABC):
    """One wait for ``keys``.

    The table's method that completes the wait fills in ``values`` and calls ``deliver``, once.
    ``deliver`` must not use the table.
    """

    wants_queue = False

    def __init__(self, keys: Sequence[bytes], deliver: Callable[[Waiter], None]) -> None:
        self.keys = keys
        self.deliver = deliver
        self.values: list[bytes] = []
        self.parked_at: bytes | None = None

    @abstractmethod
    def advance(self, table: StoreTable) -> bytes | None:
        """Fill in ``values`` and return None, or return the key whose change to wait for."""

    def missing(self, table: StoreTable) -> Sequence[bytes]:
        """Return the awaited keys, for a message."""
        del table
        return self.keys


class KeysWaiter(Waiter):
    """Waits until all ``keys`` exist at the same time; ``values``: returns their values."""

    def __init__(
        self, keys: Sequence[bytes], deliver: Callable[[Waiter], None], *, values: bool
    ) -> None:
        super().__init__(keys, deliver)
        self._wants_values = values
        self._position = 0

    def advance(self, table: StoreTable) -> bytes | None:
        """See the base. Each key is checked a constant number of times, unless one is deleted."""
        keys = self.keys
        begin = self._position
        self._position = table.first_missing(keys, begin)
        if self._position == len(keys) and begin > 0:
            self._position = table.first_missing(keys, 0)
        if self._position < len(keys):
            return keys[self._position]
        if self._wants_values:
            self.values = [table.get(key) or b"" for key in keys]
        return None

    def missing(self, table: StoreTable) -> Sequence[bytes]:
        """See the base."""
        return table.missing(self.keys)


class PopWaiter(Waiter):
    """Waits for a value in a queue and removes it; the longest waiter is served first."""

    wants_queue = True

    def advance(self, table: StoreTable) -> bytes | None:
        """See the base."""
        value = table.pop(self.keys[0])
        if value is None:
            return self.keys[0]
        self.values = [value]
        return None


class TailWaiter(Waiter):
    """Waits until a value is longer than ``offset``."""

    def __init__(self, key: bytes, offset: int, deliver: Callable[[Waiter], None]) -> None:
        super().__init__([key], deliver)
        self._offset = offset

    def advance(self, table: StoreTable) -> bytes | None:
        """See the base."""
        key = self.keys[0]
        if table.size(key) <= self._offset:
            return key
        self.values = [table.get_from(key, self._offset)]
        return None
