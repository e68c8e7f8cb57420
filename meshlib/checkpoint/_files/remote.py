"""Checkpoints in an object store, or in any other storage that fsspec supports."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from meshlib.checkpoint._files.storage import CLAIM, Reader, Storage
from meshlib.checkpoint._files.zarr import DOCUMENT


class FsspecStorage(Storage):
    """A folder at a URL: ``s3://bucket/run``, ``gs://…``, ``memory://…``.

    Nothing is synced, because objects in a store are durable once written. Most stores have no
    exclusive creation, so writers compare claims: two that begin at the same time both choose
    another folder. An undetected second writer fails when it publishes the document, or the
    checksums reveal it when the checkpoint is loaded.
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

    def claim(self, folder: str, owner: str) -> bool:
        self._fs.invalidate_cache()
        if self._fs.exists(self._at(folder)):
            return False
        self.write(f"{folder}/{CLAIM}{owner}", [memoryview(owner.encode())])
        if self.claims(folder) == [owner]:
            return True
        self._fs.rm_file(self._at(f"{folder}/{CLAIM}{owner}"))
        return False

    def claims(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        names = [entry.rpartition("/")[2] for entry in entries]
        return [name.removeprefix(CLAIM) for name in names if name.startswith(CLAIM)]

    def publish(self, folder: str, owner: str, data: bytes) -> None:
        """Write the document into the claim and rename it; an object store copies it."""
        document = f"{folder}/{DOCUMENT}"
        if self.claims(folder) != [owner] or self.exists(document):
            raise self.taken(folder)
        claim = f"{folder}/{CLAIM}{owner}"
        self.write(claim, [memoryview(data)])
        self._fs.mv(self._at(claim), self._at(document))

    def read(self, name: str) -> bytes:
        return self._fs.cat_file(self._at(name))

    def size(self, name: str) -> int:
        return int(self._fs.info(self._at(name))["size"])

    @contextmanager
    def open(self, name: str) -> Generator[Reader]:
        """Return a reader that requests each range separately."""
        yield _FsspecReader(self._fs, self._at(name))

    def exists(self, name: str) -> bool:
        return bool(self._fs.isfile(self._at(name)))

    def folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [e["name"].rstrip("/").rpartition("/")[2] for e in entries if e["type"] != "file"]

    def remove(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(f"{folder}/{DOCUMENT}"))
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(folder), recursive=True)

    def withdraw(self, folder: str) -> None:
        for owner in self.claims(folder):
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._at(f"{folder}/{CLAIM}{owner}"))

    def below(self, folder: str) -> Storage:
        return FsspecStorage(f"{self.location.rstrip('/')}/{folder}")

    def sync(self) -> None:
        """Do nothing: written files are durable already."""

    def forget(self) -> None:
        """Do nothing: no writes are pending."""


class _FsspecReader:
    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path

    def read_into(self, buffer: memoryview, offset: int) -> None:
        data = self._fs.cat_file(self._path, start=offset, end=offset + len(buffer))
        if len(data) != len(buffer):
            raise OSError(f"the file ends at byte {offset + len(data)}")
        buffer[:] = data
