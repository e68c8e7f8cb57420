"""``Storage``: where checkpoints are kept, as folders and files by name.

A writer claims a folder before it writes: it makes the folder and puts its claim into it, an empty
file that is named after the writer. Publishing turns the claim into the document that makes the
checkpoint complete, by renaming it. Taking an unfinished checkpoint away begins with its claims. Of
a writer that publishes and another that takes away, the file system lets one have the claim. This
needs no locks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.zarr import DOCUMENT

BLOCK = 1 << 20
"""The size of one read or write: small enough that a checksum finds it in the cache."""

CLAIM = "__claim-"
"""The prefix of a claim's name. Names of arrays do not begin with two underscores."""


class Reader(Protocol):
    """A file that is open for reading."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on. Raises OSError where the file is too short."""
        ...


class Storage(ABC):
    """A folder, ``location``, and its files by name (``step-5/model/weight/c.0.0``).

    Files are written once and never changed; ``write`` makes the folders above. ``sync`` returns
    when all files of this object would survive power loss. Only regular files in ``location`` are
    read: for a link that leads out of it, a pipe or a device, ``size`` and ``open`` raise a
    CheckpointError with its name.
    """

    location: str

    @abstractmethod
    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        """Write a new file; a reader sees it whole once this has returned."""

    @abstractmethod
    def claim(self, folder: str, owner: str) -> bool:
        """Make a new folder at the top for one writer; return False where it is there already."""

    @abstractmethod
    def claims(self, folder: str) -> list[str]:
        """Return the writers that have claims in a folder; none where it is not there."""

    @abstractmethod
    def publish(self, folder: str, owner: str, data: bytes) -> None:
        """Write the document of a folder that ``owner`` has claimed, and end the claim.

        A reader sees the document whole or not at all, and it outlives all that comes after. Raises
        CheckpointError where the claim is gone, because another writer took the folder away.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's contents. Raises FileNotFoundError."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises FileNotFoundError."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """Return a context manager that gives a ``Reader``. Raises FileNotFoundError."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """True if there is a file of this name."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders at the top; none where ``location`` is not there."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a folder and all in it, its document first. One that is gone is not an error.

        Of a link to a folder the link is removed, and nothing behind it.
        """

    @abstractmethod
    def withdraw(self, folder: str) -> None:
        """Remove the claims in a folder, so that its writers cannot publish it any more."""

    @abstractmethod
    def below(self, folder: str) -> Storage:
        """Return the storage whose ``location`` is ``folder``."""

    def remove_unfinished(self, folder: str) -> None:
        """Remove a folder unless it is complete, or has become so meanwhile."""
        self.withdraw(folder)
        if not self.exists(f"{folder}/{DOCUMENT}"):
            self.remove(folder)

    @abstractmethod
    def sync(self) -> None:
        """Make the writes since the last ``sync`` durable."""

    @abstractmethod
    def forget(self) -> None:
        """Leave the writes since the last ``sync`` out of the next one: they are abandoned."""

    @property
    def place(self) -> str:
        """An identity: equal only if the same ``location`` leads to the same folder."""
        return self.location

    def path(self, name: str) -> str:
        """Return where ``name`` lies, for messages."""
        return f"{self.location.rstrip('/')}/{name}"

    def taken(self, folder: str) -> CheckpointError:
        """Return the error of a writer whose claim is gone."""
        return CheckpointError(
            f"{self.path(folder)} was removed while it was written, or published by another:"
            " another job saves in this folder; expected one job at a time"
        )
