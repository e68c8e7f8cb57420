"""``Storage``: the folders and files of checkpoints, by name.

A writer claims a folder before it writes: it makes the folder, and in it a claim, an empty file
named after the writer. Publishing writes the checkpoint's document into the claim and renames it,
which completes the checkpoint. Removing an unfinished checkpoint begins with its claims. If one
writer publishes while another removes, the file system lets only one of them rename or remove the
claim. So no locks are needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Protocol

from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.zarr import DOCUMENT

BLOCK = 1 << 20
"""The size of one read or write: small enough to be in the cache for the checksum."""

CLAIM = "__claim-"
"""The prefix of a claim's name. Names of arrays do not begin with two underscores."""


class Reader(Protocol):
    """A file that is open for reading."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on; raise OSError if the file is too short."""
        ...


class Storage(ABC):
    """The folder ``location``, and its files by name (``step-5/model/weight/c.0.0``).

    Files are written once and never changed; ``write`` makes missing folders. ``sync`` returns
    when all written files would survive power loss. Only regular files in ``location`` are read:
    for a link that leads out of it, a pipe or a device, ``size`` and ``open`` raise
    CheckpointError, which names the file.
    """

    location: str

    @abstractmethod
    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        """Write a new file, which readers see completely once this has returned."""

    @abstractmethod
    def claim(self, folder: str, owner: str) -> bool:
        """Make a new folder at the top for one writer; return False if it exists already."""

    @abstractmethod
    def claims(self, folder: str) -> list[str]:
        """Return the owners of the claims in a folder; an empty list for a missing folder."""

    @abstractmethod
    def publish(self, folder: str, owner: str, data: bytes) -> None:
        """Write the document of a folder that ``owner`` has claimed, and end the claim.

        Readers see the complete document or none, and it survives power loss. Raises
        CheckpointError if the claim is gone, because another writer removed the folder.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's contents; raise FileNotFoundError if it is missing."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return a file's size in bytes; raise FileNotFoundError if it is missing."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """Return a context manager of a ``Reader``; raise FileNotFoundError if it is missing."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether the file ``name`` exists."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Return the names of the folders at the top; an empty list if ``location`` is missing."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a folder and its contents, the document first. Do nothing if it is missing.

        If ``folder`` is a link, only the link is removed.
        """

    @abstractmethod
    def withdraw(self, folder: str) -> None:
        """Remove the claims in a folder, so that its writers cannot publish it any more."""

    @abstractmethod
    def below(self, folder: str) -> Storage:
        """Return the storage whose ``location`` is ``folder``."""

    def remove_unfinished(self, folder: str) -> None:
        """Remove a folder unless it is complete, or becomes complete meanwhile."""
        self.withdraw(folder)
        if not self.exists(f"{folder}/{DOCUMENT}"):
            self.remove(folder)

    @abstractmethod
    def sync(self) -> None:
        """Make the writes since the last ``sync`` durable."""

    @abstractmethod
    def forget(self) -> None:
        """Abandon the writes since the last ``sync``: the next one does not wait for them."""

    @property
    def place(self) -> str:
        """An identity of the folder; equal places mean one folder."""
        return self.location

    def path(self, name: str) -> str:
        """Return the path or URL of ``name``, for messages."""
        return f"{self.location.rstrip('/')}/{name}"

    def taken(self, folder: str) -> CheckpointError:
        """Return the error of a writer whose claim is gone."""
        return CheckpointError(
            f"{self.path(folder)} was removed or published by another job while it was written;"
            " expected one job at a time to save in this folder"
        )
