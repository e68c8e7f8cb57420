"""The storage of a path or URL."""

from __future__ import annotations

import os

from meshlib.checkpoint._files.local import LocalStorage
from meshlib.checkpoint._files.remote import FsspecStorage
from meshlib.checkpoint._files.storage import Storage

Location = str | os.PathLike[str]


def open_storage(location: Location, *, sync: bool = True) -> Storage:
    """Return the storage at a path of the file system, or at a URL, which fsspec opens.

    A ``file://`` URL is a path. With ``sync=False`` writes do not wait for the disk. Raises
    ImportError for a URL without fsspec, and TypeError for a ``location`` that is neither a path
    nor a URL.
    """
    if not isinstance(location, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"path is {location!r}; expected a path or a URL")
    text = os.fspath(location).removeprefix("file://")
    return FsspecStorage(text) if "://" in text else LocalStorage(text, sync=sync)
