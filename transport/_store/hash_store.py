"""A store in one process, for its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from transport._errors import DistError, DistStoreError
from transport._net.fork import refusal
from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._store.commands import Commands, Fields, Op
from transport._store.table import Waiter
from transport._waiting.deadline import Deadline, Timeout
from transport._waiting.interrupts import sliced

T = TypeVar("T")


class _Shared:
    """The state that all clones of a HashStore share."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.commands = Commands()
        # Separate and reentrant: a factory runs under it, and may use the store and ``in_process``.
        self.objects_lock = threading.RLock()
        self.objects: dict[str, Any] = {}


class HashStore(Store):
    """A store in this process's memory; ranks that are threads share the object.

    ``timeout`` limits every wait: seconds (300 by default) or a timedelta.
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
        self._commands = self._shared.commands
        self._closed = False
        self._waits: dict[Waiter, threading.Event] = {}

    def _request(self, op: Op, fields: Fields) -> Fields:
        self._refuse_in_a_fork()
        with self._lock:
            self._check_open()
            answer = self._commands.answer(op, fields)
        assert answer is not None, op
        return answer

    def clone(self) -> HashStore:
        self._refuse_in_a_fork()
        self._check_open()
        return HashStore(self._timeout, _shared=self._shared)

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        if self._shared.pid != os.getpid():
            return
        with self._lock:
            super().end_waits(error, by)
            for event in self._waits.values() if error is not None else ():
                event.set()

    def close(self) -> None:
        """End the waits on this object. The data lives until the last clone is freed."""
        if self._shared.pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            for waiter, event in self._waits.items():
                self._commands.table.withdraw(waiter)
                event.set()
            self._waits.clear()

    def describe(self) -> str:
        return "HashStore()"

    @property
    def in_one_process(self) -> bool:
        return True

    def in_process(self, key: str, factory: Callable[[], T]) -> T:
        """Return the one object under ``key`` that all users of this store share.

        If missing, ``factory()`` makes it. The factory may use the store, but must not wait for
        another thread that calls ``in_process``.
        """
        self._refuse_in_a_fork()
        self._check_open()
        with self._shared.objects_lock:
            if key not in self._shared.objects:
                self._shared.objects[key] = factory()
            return self._shared.objects[key]

    def _refuse_in_a_fork(self) -> None:
        """Raise DistStoreError in a forked child, where another thread may have held the lock."""
        if why := refusal(
            self.describe(), self._shared.pid, "a store for processes, such as a TCPStore"
        ):
            raise DistStoreError(why)

    def _check_open(self) -> None:
        if self._closed:
            raise DistStoreError(f"{self.describe()} is closed")

    def _wake(self, waiter: Waiter) -> None:
        event = self._waits.pop(waiter, None)
        if event is not None:
            event.set()

    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        deadline = Deadline.after(self._seconds(timeout))
        self._refuse_in_a_fork()
        with self._lock:
            self._check_open()
            if (answer := self._commands.answer(op, fields)) is not None:
                return answer
            table, waiter = self._commands.waiter(op, fields, self._wake)
            if table.submit(waiter):
                return waiter.values
            event = self._waits[waiter] = threading.Event()
            if self._ends:
                event.set()
        try:
            sliced(event.wait, deadline.remaining())
        finally:
            unfinished = False
            missing: Fields = ()
            # Many waiters may wake up together: the usual case avoids the lock.
            if waiter in self._waits or self._closed:
                # Also after Ctrl-C: an abandoned wait must not take a value from a queue.
                with self._lock:
                    missing = waiter.missing(table)
                    unfinished = table.withdraw(waiter)
                    self._waits.pop(waiter, None)
        self._check_open()
        if unfinished:
            raise self._wait_error(op, missing, deadline)
        return waiter.values
