"""Checkpoints on a file system that all ranks share."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.storage import CLAIM, Reader, Storage
from meshlib.checkpoint._files.zarr import DOCUMENT
from transport._place import this_machine
from transport._waiting.interrupts import join

_SYNCING = 8
"""The number of files synced at once: a disk flushes several together."""


class LocalStorage(Storage):
    """A folder of a file system that all ranks share.

    Each file is synced in the background while the next one is written.
    """

    def __init__(self, location: str, *, sync: bool) -> None:
        self.location = location
        self._root = Path(location)
        self._sync = sync
        # Made at the first write, because a Storage is also sent between ranks.
        self._syncing: _Syncing | None = None
        self._folders: set[Path] = set()

    @property
    def place(self) -> str:
        """The machine and the path: another machine may have another disk at this path."""
        return f"{this_machine()} {self._root.absolute()}"

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        """Write a new file, block by block."""
        path = self._root / name
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        _write(file, parts)
        if self._sync:
            self._later(file)
        else:
            os.close(file)

    def claim(self, folder: str, owner: str) -> bool:
        """Make the folder, which only one writer can do, and the claim in it."""
        self._root.mkdir(parents=True, exist_ok=True)
        try:
            (self._root / folder).mkdir()
            (self._root / folder / f"{CLAIM}{owner}").touch()
        except (FileExistsError, FileNotFoundError):  # it exists, or was removed at once
            return False
        return True

    def claims(self, folder: str) -> list[str]:
        return [path.name.removeprefix(CLAIM) for path in self._claim_files(folder)]

    def _claim_files(self, folder: str) -> list[Path]:
        return list((self._root / folder).glob(f"{CLAIM}*"))

    def publish(self, folder: str, owner: str, data: bytes) -> None:
        """Write the document into the claim, sync it, rename it, and sync the folders."""
        top = self._root / folder
        claim = top / f"{CLAIM}{owner}"
        try:
            file = os.open(claim, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            _write(file, [memoryview(data)])
            if self._sync:
                _sync_and_close(file)
            else:
                os.close(file)
            os.rename(claim, top / DOCUMENT)
        except FileNotFoundError:
            raise self.taken(folder) from None
        if self._sync:
            for path in (top, self._root):
                _sync_and_close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def read(self, name: str) -> bytes:
        data = bytearray(self.size(name))
        with self.open(name) as file:
            file.read_into(memoryview(data), 0)
        return bytes(data)

    def size(self, name: str) -> int:
        return self._regular(name)[1]

    @contextmanager
    def open(self, name: str) -> Generator[Reader]:
        file = os.open(self._regular(name)[0], os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield _LocalReader(file)
        finally:
            os.close(file)

    def _regular(self, name: str) -> tuple[str, int]:
        """Return the path, without links, and the size of a regular file.

        A pipe would block its reader, and a link may lead out of the checkpoint.
        """
        path = os.path.realpath(self._root / name)
        # Not cached: a Storage is sent between ranks, and another machine may have other links.
        if path.startswith(f"{os.path.realpath(self._root)}{os.sep}"):
            found = os.stat(path)
            if stat.S_ISREG(found.st_mode):
                return path, found.st_size
        raise CheckpointError(
            f"{self.path(name)} is {path}; expected a regular file in {self.location}"
        )

    def exists(self, name: str) -> bool:
        return (self._root / name).is_file()

    def folders(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, folder: str) -> None:
        path = self._root / folder
        if path.is_symlink():
            path.unlink(missing_ok=True)
            return
        (path / DOCUMENT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def withdraw(self, folder: str) -> None:
        for path in self._claim_files(folder):
            path.unlink(missing_ok=True)

    def below(self, folder: str) -> Storage:
        return LocalStorage(str(self._root / folder), sync=self._sync)

    def sync(self) -> None:
        """Wait until the disk has the files, and then the folders that name them."""
        folders, self._folders = self._folders, set()
        if not self._sync:
            return
        above = {up for folder in folders for up in folder.parents if up.is_relative_to(self._root)}
        try:
            for folder in (*folders, *above):
                self._later(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
        finally:
            errors = self._end()
        if errors:
            raise errors[0]

    def forget(self) -> None:
        """Wait for running syncs, and drop the list of folders: they may be removed."""
        self._folders.clear()
        self._end()

    def _later(self, file: int) -> None:
        self._syncing = self._syncing or _Syncing()
        self._syncing.add(file)

    def _end(self) -> list[OSError]:
        syncing, self._syncing = self._syncing, None
        return [] if syncing is None else syncing.end()


class _Syncing:
    """Threads that sync several files at once.

    Not an executor: it accepts no work after the main thread has ended, while the last checkpoint
    is still being written.
    """

    def __init__(self) -> None:
        self._files: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._errors: list[OSError] = []

    def add(self, file: int) -> None:
        """Sync an open file in the background, then close it."""
        if len(self._threads) < _SYNCING:
            # ``end`` waits for the threads; a program that is interrupted before need not.
            thread = threading.Thread(target=self._run, name="sync", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._files.put(file)

    def end(self) -> list[OSError]:
        """Wait for all files; return the errors."""
        for _ in self._threads:
            self._files.put(None)
        for thread in self._threads:
            join(thread)
        return self._errors

    def _run(self) -> None:
        while (file := self._files.get()) is not None:
            try:
                _sync_and_close(file)
            except OSError as error:
                self._errors.append(error)


def _sync_and_close(file: int) -> None:
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write(file: int, parts: Iterable[memoryview]) -> None:
    """Write to an open file, block by block; close the file if that fails."""
    try:
        for part in parts:
            begin = 0
            while begin < len(part):
                begin += os.write(file, part[begin:])
    except OSError:
        os.close(file)
        raise


class _LocalReader:
    def __init__(self, file: int) -> None:
        self._file = file

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], offset + done)
            if not count:
                raise OSError(f"the file ends at byte {offset + done}")
            done += count
