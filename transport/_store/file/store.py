"""A store in a file: on one host, or on a shared file system."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from transport._checks import to_whole_number
from transport._errors import DistStoreError
from transport._net.fork import refusal
from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._store.commands import CHANGES, Fields, Op
from transport._store.file.log import FileLog
from transport._store.table import Waiter
from transport._waiting.deadline import Deadline, Timeout
from transport._waiting.interrupts import next_slice
from transport._waiting.spinning import PollBackoff

# Pauses between two checks of the file's size. A network file system may show an old size to a
# process without the lock, so an occasional check acquires the lock.
_PAUSES = 0.0005, 0.005, 1.5
_LOCKED_CHECK_SECONDS = 0.25
_CLOSE_SECONDS = 5.0


class FileStore(Store):
    """A store whose users share the file ``file_name``.

    Args:
        file_name: The file; it is created if missing, and its directory must exist. Data of a
            crashed job in it is detected and discarded.
        world_size: The number of stores on the file. Once that many were opened, the last one to
            close removes the file. With -1 (unknown) the last one always removes it.
        timeout: The limit of every wait, seconds or a timedelta.

    Raises DistStoreError if the file cannot be used, ValueError and TypeError for wrong arguments.
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
        self._world_size = number
        self._open_log(None)

    def _open_log(self, beside: FileLog | None) -> None:
        deadline = Deadline.after(self._timeout)
        self._log = FileLog(self._path, self._world_size, deadline, beside)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = threading.Event()

    @property
    def path(self) -> str:
        """The file's absolute path."""
        return self._path

    def clone(self) -> FileStore:
        """Return another store on the file, which does not count towards ``world_size``."""
        with self._open():
            other = FileStore.__new__(FileStore)
            Store.__init__(other, self._timeout)
            other._path, other._world_size = self._path, self._world_size
            other._open_log(self._log)
            return other

    def hang_up(self) -> None:
        self._closing.set()

    def close(self) -> None:
        """Leave the file; the last user removes it. Current waits raise DistStoreError."""
        if self._pid != os.getpid():
            return
        self._closing.set()
        with self._lock:
            if self._log.is_open:
                # If a stopped process holds the lock, the next job cleans up.
                with suppress(DistStoreError):
                    self._log.leave(Deadline.after(_CLOSE_SECONDS))

    def describe(self) -> str:
        return f"FileStore({self._path!r})"

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        log: FileLog | None = getattr(self, "_log", None)
        if log is not None and log.is_open and self._pid == os.getpid():
            _warn(f"unclosed {self.describe()}", ResourceWarning, source=self)
            log.close()

    @contextmanager
    def _open(self) -> Generator[None]:
        """Hold the thread lock for a block; raise DistStoreError if closed or in a fork."""
        # Before acquiring the lock, which another thread may have held at the fork.
        if why := refusal(self.describe(), self._pid, "a new one made there"):
            raise DistStoreError(why)
        with self._lock:
            if self._closing.is_set():
                raise DistStoreError(f"{self.describe()} is closed")
            yield

    @contextmanager
    def _held(self, *, shared: bool) -> Generator[FileLog]:
        """Hold the file's lock for a block (``shared``: with other readers); yield the log."""
        with self._open(), self._log.locked(Deadline.after(self._timeout), shared=shared):
            yield self._log

    def _request(self, op: Op, fields: Fields) -> Fields:
        with self._held(shared=op not in CHANGES) as log:
            answer = log.run(op, fields)
        assert answer is not None, op
        return answer

    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        deadline = Deadline.after(self._seconds(timeout))
        table, waiter = self._log.commands.waiter(op, fields, _ignore)
        pauses = PollBackoff(*_PAUSES)
        seen, looked = -1, 0.0
        while True:
            expired = deadline.expired or bool(self._ends)
            size = self._size()
            if size != seen or expired or time.monotonic() - looked >= _LOCKED_CHECK_SECONDS:
                seen, looked = size, time.monotonic()
                if (answer := self._try(op, fields, waiter)) is not None:
                    return answer
            if expired:
                raise self._wait_error(op, waiter.missing(table), deadline)
            # Closing ends the wait.
            self._closing.wait(next_slice(pauses.next(deadline.remaining())))

    def _size(self) -> int:
        with self._open():
            return self._log.size()

    def _try(self, op: Op, fields: Fields, waiter: Waiter) -> Fields | None:
        """Return the answer to a waiting command, None if it must keep waiting."""
        if op == Op.POP:
            with self._held(shared=False) as log:
                return log.run(Op.TRY_POP, fields) or None
        with self._held(shared=True) as log:
            return waiter.values if waiter.advance(log.commands.table) is None else None


def _ignore(_waiter: Waiter) -> None:
    """Do nothing: this store polls its waiters itself."""
