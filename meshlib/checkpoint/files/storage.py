"""Where checkpoints are kept: folders and files by name, on a file system or behind fsspec."""

from __future__ import annotations

import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from transport.place import this_machine

BLOCK = 1 << 20
"""What is read or written at once: small enough that a checksum finds it in the cache."""

_SYNCING = 8
"""How many files are synced at once: a disk takes several at one turn."""


class Reader(Protocol):
    """A file that is open for reading."""

    size: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on. Raises OSError where the file is too short."""
        ...


class Storage(ABC):
    """A folder, ``location``, and what lies in it by name (``step-5/model/weight/c.0.0``).

    Files are written once and never changed; ``write`` makes the folders above. ``sync`` returns
    when all that this object has written would outlive a loss of power.
    """

    location: str

    @abstractmethod
    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        """Write a new file; a reader sees it whole once this has returned."""

    @abstractmethod
    def publish(self, name: str, data: bytes) -> None:
        """Write a file that any reader sees whole or not at all, and that outlives all after it."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's contents. Raises FileNotFoundError."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """Return a context manager that gives a ``Reader``. Raises FileNotFoundError."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders at the top; none where ``location`` is not there."""

    @abstractmethod
    def remove(self, folder: str, first: str) -> None:
        """Remove a folder and all in it, the file ``first`` before everything else."""

    @abstractmethod
    def sync(self) -> None:
        """Make what was written since the last time last."""

    @abstractmethod
    def forget(self) -> None:
        """Leave out of the next ``sync`` what was written since the last one: it is given up."""

    @property
    def place(self) -> str:
        """What is the same only where the same ``location`` leads to the same folder."""
        return self.location

    def path(self, name: str) -> str:
        """Return where ``name`` lies, for messages."""
        return f"{self.location.rstrip('/')}/{name}"


def open_storage(location: str | os.PathLike[str], *, sync: bool = True) -> Storage:
    """Return the storage at a path of the file system, or at a URL, which fsspec opens.

    With ``sync`` false nothing waits for disks. Raises ImportError, with the mend, for a URL
    without fsspec, TypeError for what is neither.
    """
    if not isinstance(location, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"path is {location!r}; expected a path or a URL")
    text = os.fspath(location)
    return FsspecStorage(text) if "://" in text else LocalStorage(text, sync=sync)


class LocalStorage(Storage):
    """A folder of a file system that all ranks see.

    The disk begins with a file when it is written, while the next one is.
    """

    def __init__(self, location: str, *, sync: bool) -> None:
        self.location = location
        self._root = Path(location)
        self._sync = sync
        self._syncing: _Syncing | None = None  # where something is being written
        self._folders: set[Path] = set()

    @property
    def place(self) -> str:
        """The machine and the path: another machine may have another disk there."""
        return f"{this_machine()} {self._root.absolute()}"

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        """Write a new file, block by block."""
        path = self._root / name
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            for part in parts:
                begin = 0
                while begin < len(part):
                    begin += os.write(file, part[begin:])
        except BaseException:
            os.close(file)
            raise
        if self._sync:
            self._later(file)
        else:
            os.close(file)

    def publish(self, name: str, data: bytes) -> None:
        """Write to another name, make it last, rename it, and make that last."""
        self.write(f"{name}.part", [memoryview(data)])
        self.sync()
        path = self._root / name
        os.rename(f"{path}.part", path)
        if self._sync:
            for folder in (path.parent, path.parent.parent):
                _sync_and_close(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    @contextmanager
    def open(self, name: str) -> Generator[Reader]:
        file = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _LocalReader(file)
        finally:
            os.close(file)

    def exists(self, name: str) -> bool:
        return (self._root / name).is_file()

    def folders(self) -> list[str]:
        try:
            with os.scandir(self._root) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder; one that is gone is no error."""
        with suppress(FileNotFoundError):
            (self._root / folder / first).unlink()
        shutil.rmtree(self._root / folder, ignore_errors=True)

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
        """Wait until nothing is under way, and forget the folders: they may be removed."""
        self._folders.clear()
        self._end()

    def _later(self, file: int) -> None:
        self._syncing = self._syncing or _Syncing()
        self._syncing.add(file)

    def _end(self) -> list[OSError]:
        syncing, self._syncing = self._syncing, None
        return [] if syncing is None else syncing.end()


class _Syncing:
    """Waits for the disk, for several files at once.

    By threads of its own: an executor takes nothing any more when the program has ended, whose last
    checkpoint is still being written then.
    """

    def __init__(self) -> None:
        self._files: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._errors: list[OSError] = []

    def add(self, file: int) -> None:
        """Begin with an open file, which is closed then."""
        if len(self._threads) < _SYNCING:
            # ``end`` waits for it; where a program is broken off before, nobody need.
            thread = threading.Thread(target=self._run, name="sync", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._files.put(file)

    def end(self) -> list[OSError]:
        """Wait for all of them; return what went wrong."""
        for _ in self._threads:
            self._files.put(None)
        for thread in self._threads:
            thread.join()
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


class _LocalReader:
    def __init__(self, file: int) -> None:
        self._file = file
        self.size = os.fstat(file).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], offset + done)
            if not count:
                raise OSError(f"the file ends at byte {offset + done}")
            done += count


class FsspecStorage(Storage):
    """A folder behind a URL: ``s3://bucket/run``, ``gs://…``, ``memory://…``.

    A file of an object store is there when it was written whole, so nothing is renamed or synced.
    """

    def __init__(self, location: str) -> None:
        try:
            core: Any = import_module("fsspec.core")
        except ImportError:
            raise ImportError(
                f"path {location!r} is a URL, which needs fsspec: pip install fsspec, and what it"
                " needs for this kind (s3fs, gcsfs, ...)"
            ) from None
        self.location = location
        self._fs, self._root = core.url_to_fs(location)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        path = self._at(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._fs.open(path, "wb") as file:
            for part in parts:
                file.write(part)

    def publish(self, name: str, data: bytes) -> None:
        """Write a file: the store shows it when it is whole."""
        self.write(name, [memoryview(data)])

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._at(name))

    @contextmanager
    def open(self, name: str) -> Generator[Reader]:
        """Return a reader, which asks for each range."""
        path = self._at(name)
        yield _FsspecReader(self._fs, path, int(self._fs.info(path)["size"]))

    def exists(self, name: str) -> bool:
        return bool(self._fs.isfile(self._at(name)))

    def folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] != "file"]

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder; one that is gone is no error."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(f"{folder}/{first}"))
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(folder), recursive=True)

    def sync(self) -> None:
        """Nothing: what was written is there."""

    def forget(self) -> None:
        """Nothing: there is no sync."""


class _FsspecReader:
    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs, self._path = fs, path
        self.size = size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        data = self._fs.cat_file(self._path, start=offset, end=offset + len(buffer))
        if len(data) != len(buffer):
            raise OSError(f"the file ends at byte {offset + len(data)}")
        buffer[:] = data
