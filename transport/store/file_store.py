"""A store in a file that all its users can open: on one host, or on a shared file system."""

# ruff: noqa: D102 (the methods without words are Store's, which has them)

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress

from transport.checks import to_whole_number
from transport.deadline import Deadline, Timeout
from transport.errors import DistStoreError, QueueEmptyError
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
from transport.store.file_log import FileLog, Record
from transport.store.table import KeysWaiter, PopWaiter, TailWaiter, Waiter

# A waiting user looks at the file's size so often, and, because a network file system may show
# an old size to one who does not lock, under the lock every now and then.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.005
_LOCKED_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 5.0


class FileStore(Store):
    """A store whose users share the file ``file_name``.

    Args:
        file_name: the file; it is made when missing, and its directory must exist. What a crashed
            job left in it is noticed and thrown away.
        world_size: how many stores will be made on the file; the last to close removes it once so
            many were there. -1: unknown, and the last one removes it always.
        timeout: the longest of every wait, seconds or a timedelta.

    Raises DistStoreError when the file cannot be used, ValueError and TypeError for arguments.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
    ) -> None:
        super().__init__(timeout)
        number = to_whole_number(world_size, "world_size")
        if number == 0 or number < -1:
            raise ValueError(f"world_size must be at least 1, or -1 for unknown; got {world_size}")
        try:
            self._path = os.path.abspath(os.fspath(file_name))
        except TypeError:
            raise TypeError(
                f"file_name must be a path, got {type(file_name).__name__}: {file_name!r}"
            ) from None
        self._open_log(FileLog(self._path, world_size, Deadline.after(timeout)))

    def _open_log(self, log: FileLog) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._log = log
        self._closing = threading.Event()

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._path

    def set(self, key: str, value: Value) -> None:
        self._set([(to_key(key), to_bytes(value))])

    def get(self, key: str, timeout: Timeout | None = None) -> bytes:
        return self._wait(KeysWaiter([to_key(key)], _nobody, values=True), timeout)[0]

    def add(self, key: str, amount: int) -> int:
        stored, number = to_key(key), to_whole_number(amount, "amount")
        with self._changing() as log:
            total = log.table.add(stored, number)
            log.write((Record.SET, (stored, b"%d" % total)))
        return total

    def append(self, key: str, value: Value) -> None:
        fields = to_key(key), to_bytes(value)
        with self._changing() as log:
            log.table.append(*fields)
            log.write((Record.APPEND, fields))

    def check(self, keys: Sequence[str]) -> bool:
        with self._reading() as log:
            return log.table.has_all(to_keys(keys))

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        stored = to_key(key)
        expected = to_bytes(expected_value, "expected_value")
        desired = to_bytes(desired_value, "desired_value")
        with self._changing() as log:
            before = log.table.get(stored)
            value = log.table.compare_set(stored, expected, desired)
            if log.table.get(stored) != before:
                log.write((Record.SET, (stored, value)))
        return value

    def delete_key(self, key: str) -> bool:
        stored = to_key(key)
        with self._changing() as log:
            deleted = log.table.delete(stored)
            if deleted:
                log.write((Record.DELETE, (stored,)))
        return deleted

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait(KeysWaiter(to_keys(keys), _nobody, values=True), None)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._set(to_pairs(keys, values))

    def _set(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        with self._changing() as log:
            for pair in pairs:
                log.table.set(*pair)
            log.write(*((Record.SET, pair) for pair in pairs))

    def num_keys(self) -> int:
        with self._reading() as log:
            return len(log.table)

    def list_keys(self) -> list[str]:
        with self._reading() as log:
            return log.table.names()

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        self._wait(KeysWaiter(to_keys(keys), _nobody, values=False), timeout)

    def queue_push(self, key: str, value: Value) -> None:
        fields = to_key(key), to_bytes(value)
        with self._changing() as log:
            log.table.push(*fields)
            log.write((Record.PUSH, fields))

    def queue_pop(self, key: str, block: bool = True, timeout: Timeout | None = None) -> bytes:
        stored = to_key(key)
        if block:
            return self._wait(PopWaiter(stored, _nobody), timeout)[0]
        with self._changing() as log:
            value = log.table.pop(stored)
            if value is None:
                raise QueueEmptyError(f"{self.describe()}: queue {key!r} is empty")
            log.write((Record.POP, (stored,)))
        return value

    def queue_len(self, key: str) -> int:
        with self._reading() as log:
            return log.table.queue_len(to_key(key))

    def tail(self, key: str, offset: int, timeout: Timeout | None = None) -> bytes:
        return self._wait(TailWaiter(to_key(key), check_offset(offset), _nobody), timeout)[0]

    def set_will(self, key: str, value: Value) -> bool:
        """Return False: nobody watches over the users of a file."""
        to_key(key)
        to_bytes(value)
        return False

    def clone(self) -> FileStore:
        """Return another store on the file, which does not count towards ``world_size``."""
        other = FileStore.__new__(FileStore)
        Store.__init__(other, self._timeout)
        other._path = self._path
        with self._open():
            other._open_log(FileLog.beside(self._log, Deadline.after(self._timeout)))
        return other

    def hang_up(self) -> None:
        self._closing.set()

    def close(self) -> None:
        """Leave the file; the last user removes it. Waits under way end with DistStoreError."""
        if self._pid != os.getpid():
            return
        self._closing.set()
        with self._lock:
            if self._log.is_open:
                # A stopped process may hold the file: then it is left to the next job to notice.
                with suppress(DistStoreError):
                    self._log.leave(Deadline.after(_CLOSE_SECONDS))

    def describe(self) -> str:
        return f"FileStore({self._path!r})"

    def __enter__(self) -> FileStore:
        """Return the store itself, which the end of the block closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        log: FileLog | None = getattr(self, "_log", None)
        if log is not None and log.is_open and self._pid == os.getpid():
            _warn(f"unclosed {self.describe()}", ResourceWarning, source=self)
            log.close()

    @contextmanager
    def _open(self) -> Generator[None]:
        """Hold the lock for a block in which this store is open, and this process its own."""
        # Before the lock, which a thread of the parent's may have held.
        if why := refusal(self.describe(), self._pid, "a new one made there"):
            raise DistStoreError(why)
        with self._lock:
            if self._closing.is_set():
                raise DistStoreError(f"{self.describe()} is closed")
            yield

    @contextmanager
    def _changing(self) -> Generator[FileLog]:
        with self._open(), self._log.locked(Deadline.after(self._timeout)):
            yield self._log

    @contextmanager
    def _reading(self) -> Generator[FileLog]:
        with self._open(), self._log.locked(Deadline.after(self._timeout), shared=True):
            yield self._log

    def _wait(self, waiter: Waiter, timeout: Timeout | None) -> list[bytes]:
        deadline = Deadline.after(self._seconds(timeout))
        pause = _FIRST_PAUSE
        seen, looked = -1, 0.0
        while True:
            expired = deadline.expired or bool(self._ends)
            size = self._size()
            if size != seen or expired or time.monotonic() - looked >= _LOCKED_LOOK_SECONDS:
                seen, looked = size, time.monotonic()
                if self._try(waiter):
                    return waiter.values
            if expired:
                missing = waiter.missing(self._log.table)
                raise self._waited_in_vain(waiter.what, missing, deadline)
            # Closing ends the wait.
            self._closing.wait(min(pause, deadline.remaining()))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _size(self) -> int:
        with self._open():
            return self._log.size()

    def _try(self, waiter: Waiter) -> bool:
        if not isinstance(waiter, PopWaiter):
            with self._reading() as log:
                return waiter.advance(log.table) is None
        with self._changing() as log:
            key = waiter.missing(log.table)[0]
            if waiter.advance(log.table) is not None:
                return False
            log.write((Record.POP, (key,)))
            return True


def _nobody(_waiter: Waiter) -> None:
    """Nobody is told: this store asks its waiters itself."""
