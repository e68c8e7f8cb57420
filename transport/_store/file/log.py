"""The file behind a FileStore: a log of commands that every user replays, and the list of its
users.

The file begins with a magic line. Each record has a length, a command's number and fields. Locks
are on bytes far beyond the data: one is locked for each access, and one by each live user. If a
user did not leave and no user is alive, the file is left over from a crashed job, and the next job
empties it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Generator, Sequence

from transport._errors import DistStoreError, StorePlaceError
from transport._net.fork import close_in_forked_children
from transport._platform import same_file
from transport._store.commands import CHANGES, Commands, Fields, Op
from transport._store.fields import pack_fields, unpack_fields
from transport._store.file import lock
from transport._waiting.deadline import Deadline

_MAGIC = b"meshlib FileStore 2\n"
_HEAD = struct.Struct("<IB")
_ACCESS_LOCK = 1 << 60
_USER_LOCKS = _ACCESS_LOCK + 1
# Records that are not commands.
_JOIN, _LEAVE = 254, 255


class FileLog:
    """One user's handle of the file at ``path``, with the replayed data in ``commands``.

    ``members`` is the number of members that will join, -1 if unknown. Once that many have joined,
    the last user alive removes the file when it leaves. With -1 the last user always does.

    With ``beside``, another handle, this one opens the same file, even if the path has changed,
    and does not count as a member. Not thread-safe.
    """

    def __init__(
        self, path: str, members: int, deadline: Deadline, beside: FileLog | None = None
    ) -> None:
        self._path = path
        self._members = members
        while True:
            self._reset()
            self._fd = self._open(path if beside is None else same_file(beside._fd, path))
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, self._fd)
                with self.locked(deadline):
                    if beside is not None or os.fstat(self._fd).st_nlink > 0:
                        self._join(deadline, member=beside is None)
                        undo.pop_all()
                        break
            # The last user removed the file before this one had locked it: try again.
        # An inherited handle would make a dead parent seem alive.
        close_in_forked_children(self)

    def _reset(self) -> None:
        """Forget the replayed data."""
        self.commands = Commands()
        self._joined = self._left = self._users = self._offset = 0

    @property
    def is_open(self) -> bool:
        """True if this user has neither left nor closed the file."""
        return self._fd >= 0

    @contextlib.contextmanager
    def locked(self, deadline: Deadline, *, shared: bool = False) -> Generator[None]:
        """Hold the file's lock for a block (``shared``: with other readers), and update
        ``commands`` first.

        Raises DistStoreError if the file stays locked until the deadline.
        """
        try:
            lock.acquire(self._fd, _ACCESS_LOCK, 1, deadline, shared=shared)
        except TimeoutError as error:
            raise DistStoreError(f"{self._path!r} cannot be locked: {error}") from error
        try:
            self.replay()
            yield
        finally:
            lock.release(self._fd, _ACCESS_LOCK, 1)

    def size(self) -> int:
        """Return the file's size, which grows with every change. Needs no lock."""
        return os.fstat(self._fd).st_size

    def run(self, op: Op, fields: Fields) -> Fields | None:
        """Return the answer to a command, None if it must wait. The caller holds the lock.

        If the command changed the data, append it to the file.
        """
        before = self.commands.table.changes
        answer = self.commands.answer(op, fields)
        if self.commands.table.changes != before:
            self._write(op, fields)
        return answer

    def _write(self, record: int, fields: Sequence[bytes]) -> None:
        data = _pack(record, fields)
        if os.fstat(self._fd).st_size > self._offset:
            # A writer died in the middle of a record.
            os.ftruncate(self._fd, self._offset)
        written = 0
        while written < len(data):
            try:
                written += os.pwrite(self._fd, data[written:], self._offset + written)
            except OSError as error:
                os.ftruncate(self._fd, self._offset)
                raise DistStoreError(f"{self._path!r} cannot be written: {error}") from error
        self._offset += len(data)

    def leave(self, deadline: Deadline) -> None:
        """Stop using the file; remove it if no other user needs it."""
        try:
            with self.locked(deadline):
                self._write(_LEAVE, ())
                # Released under the access lock, so that the next leaving user sees it.
                lock.release(self._fd, _USER_LOCKS, 0)
                complete = self._members < 0 or self._joined >= self._members
                if complete and not self._others_alive() and self._is_at_path():
                    os.unlink(self._path)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file as a dying process does. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def _open(path: str) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorePlaceError(
                f"file_name must be a file that can be created and written, got {path!r}:"
                f" {error.strerror}"
            ) from error

    def _join(self, deadline: Deadline, *, member: bool) -> None:
        # The caller holds the lock, and ``commands`` is up to date.
        complete = self._members >= 0 and self._joined >= self._members
        ended = self._left < self._users or complete or self._members < 0
        if member and self._users and ended and not self._others_alive():
            self._reset()
        if self._offset == 0:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, _MAGIC, 0)
            self._offset = len(_MAGIC)
        self._users += 1
        self._joined += member
        lock.acquire(self._fd, _USER_LOCKS + self._users, 1, deadline)
        self._write(_JOIN, (b"1" if member else b"0",))

    def _others_alive(self) -> bool:
        return lock.is_locked_by_others(self._fd, _USER_LOCKS, 0)

    def _is_at_path(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        return False

    def replay(self) -> None:
        """Bring ``commands`` up to date with the complete records in the file."""
        size = os.fstat(self._fd).st_size
        if size <= self._offset:
            return
        data = os.pread(self._fd, size - self._offset, self._offset)
        begin = 0
        if self._offset == 0:
            if not data.startswith(_MAGIC):
                if _MAGIC.startswith(data):
                    return
                raise StorePlaceError(
                    f"file_name must be a new file or a FileStore's, got {self._path!r},"
                    f" which begins with {data[: len(_MAGIC)]!r}"
                )
            begin = len(_MAGIC)
        while begin + _HEAD.size <= len(data):
            length, record = _HEAD.unpack_from(data, begin)
            end = begin + _HEAD.size + length
            if end > len(data):
                break
            try:
                self._apply(record, unpack_fields(data, begin + _HEAD.size, end))
            except (TypeError, ValueError, IndexError, DistStoreError) as error:
                raise DistStoreError(
                    f"{self._path!r} is damaged at byte {self._offset + begin}: {error}"
                ) from error
            begin = end
        self._offset += begin

    def _apply(self, record: int, fields: list[bytes]) -> None:
        if record in CHANGES:
            self.commands.answer(record, fields)
        elif record == _JOIN:
            self._users += 1
            self._joined += fields[0] == b"1"
        elif record == _LEAVE:
            self._left += 1
        else:
            raise ValueError(f"records of kind {record} are unknown")


def _pack(record: int, fields: Sequence[bytes]) -> bytes:
    body = pack_fields(fields)
    return _HEAD.pack(len(body), record) + body
