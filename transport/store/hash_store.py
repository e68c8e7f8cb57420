"""A store inside one process, shared by its threads."""

# ruff: noqa: D102 (the methods without words are Store's, which has them)

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from transport.checks import to_whole_number
from transport.deadline import Deadline, Timeout
from transport.errors import DistError, DistStoreError, QueueEmptyError
from transport.net.fork import refusal
from transport.store.base import (
    DEFAULT_STORE_TIMEOUT,
    Store,
    Value,
    check_offset,
    to_bytes,
    to_key,
    to_keys,
    to_pairs,
)
from transport.store.table import KeysWaiter, PopWaiter, Table, TailWaiter, Waiter

T = TypeVar("T")


class _Shared:
    """What all clones of a HashStore share."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.table = Table()
        # Its own lock, which a factory may take again and under which it may use the store.
        self.objects_lock = threading.RLock()
        self.objects: dict[str, Any] = {}


class HashStore(Store):
    """A store that lives in this process' memory; ranks that are threads share the object.

    ``timeout`` is the longest of every wait: seconds (300 by default) or a timedelta.
    """

    def __init__(
        self,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        *,
        _shared: _Shared | None = None,
    ) -> None:
        super().__init__(timeout)
        self._shared = _shared or _Shared()
        self._lock = self._shared.lock
        self._table = self._shared.table
        self._closed = False
        self._waits: dict[Waiter, threading.Event] = {}

    def set(self, key: str, value: Value) -> None:
        data = to_bytes(value)
        with self._open():
            self._table.set(to_key(key), data)

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        stored = to_key(key)
        with self._open():
            value = self._table.get(stored)
        if value is not None:
            return value
        return self._wait(KeysWaiter([stored], self._wake, values=True), timeout)[0]

    def add(self, key: str, amount: int) -> int:
        number = to_whole_number(amount, "amount")
        with self._open():
            return self._table.add(to_key(key), number)

    def append(self, key: str, value: Value) -> None:
        data = to_bytes(value)
        with self._open():
            self._table.append(to_key(key), data)

    def check(self, keys: Sequence[str]) -> bool:
        with self._open():
            return self._table.has_all(to_keys(keys))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        expected = to_bytes(expected_value, "expected_value")
        desired = to_bytes(desired_value, "desired_value")
        with self._open():
            return self._table.compare_set(to_key(key), expected, desired)

    def delete_key(self, key: str) -> bool:
        with self._open():
            return self._table.delete(to_key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(KeysWaiter(to_keys(keys), self._wake, values=True), None)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = to_pairs(keys, values)
        with self._open():
            for key, value in pairs:
                self._table.set(key, value)

    def num_keys(self) -> int:
        with self._open():
            return len(self._table)

    def list_keys(self) -> list[str]:
        with self._open():
            return self._table.names()

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._wait(KeysWaiter(to_keys(keys), self._wake, values=False), timeout)

    def queue_push(self, key: str, value: Value) -> None:
        data = to_bytes(value)
        with self._open():
            self._table.push(to_key(key), data)

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        if block:
            return self._wait(PopWaiter(to_key(key), self._wake), timeout)[0]
        with self._open():
            value = self._table.pop(to_key(key))
        if value is None:
            raise QueueEmptyError(f"{self.describe()}: queue {key!r} is empty")
        return value

    def queue_len(self, key: str) -> int:
        with self._open():
            return self._table.queue_len(to_key(key))

    def tail(self, key: str, offset: int, timeout: Timeout | None = None) -> bytes:
        return self._wait(TailWaiter(to_key(key), check_offset(offset), self._wake), timeout)[0]

    def set_will(self, key: str, value: Value) -> bool:
        """Return False: threads do not die without their process."""
        to_key(key)
        to_bytes(value)
        return False

    def clone(self) -> HashStore:
        with self._open():
            return HashStore(self._timeout, _shared=self._shared)

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        if self._shared.pid != os.getpid():
            return
        with self._lock:
            super().end_waits(error, by)
            for event in self._waits.values() if error is not None else ():
                event.set()

    def close(self) -> None:
        """End the waits on this object. The data lives while any clone does."""
        if self._shared.pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            for waiter, event in self._waits.items():
                self._table.withdraw(waiter)
                event.set()
            self._waits.clear()

    def describe(self) -> str:
        return "HashStore()"

    @property
    def in_one_process(self) -> bool:
        return True

    def in_process(self, key: str, factory: Callable[[], T]) -> T:
        """Return the one object under ``key`` that all users of this store share.

        ``factory()`` makes it when there is none; it may use the store, but must not wait for other
        threads that ask for objects too.
        """
        with self._open():
            pass
        with self._shared.objects_lock:
            if key not in self._shared.objects:
                self._shared.objects[key] = factory()
            return self._shared.objects[key]

    @contextmanager
    def _open(self) -> Generator[None]:
        """Hold the lock for a block in which this store is open."""
        # Before the lock, which a thread of the parent's may have held.
        if why := refusal(self.describe(), self._shared.pid, "a store of processes, a TCPStore"):
            raise DistStoreError(why)
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise DistStoreError(f"{self.describe()} is closed")

    def _wake(self, waiter: Waiter) -> None:
        event = self._waits.pop(waiter, None)
        if event is not None:
            event.set()

    def _wait(self, waiter: Waiter, timeout: Timeout | None) -> list[bytes]:
        deadline = Deadline.after(self._seconds(timeout))
        event = threading.Event()
        with self._open():
            if self._table.submit(waiter):
                return waiter.values
            self._waits[waiter] = event
            if self._ends:
                event.set()
        try:
            while not event.wait(deadline.remaining()):
                if deadline.expired:
                    break
        finally:
            unfinished, missing = False, list[bytes]()
            # All who waited for one key wake up together, and need not queue for the lock then.
            if waiter in self._waits or self._closed:
                # Also after Ctrl-C: a wait that nobody waits for must not take a queue's value.
                with self._lock:
                    missing = waiter.missing(self._table)
                    unfinished = self._table.withdraw(waiter)
                    self._waits.pop(waiter, None)
        self._check_open()
        if unfinished:
            raise self._waited_in_vain(waiter.what, missing, deadline)
        return waiter.values
