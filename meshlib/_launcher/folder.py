"""The launcher's folder for temporary files, which is removed however the launcher ends.

A launcher and its guardian hold a lock on the folder through an inherited descriptor. The kernel
releases the lock when both have ended. If both were killed and could not remove the folder, the
next launcher of the same user removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


def make_folder(prefix: str) -> Path:
    """Return a new folder for temporary files, locked until this process and its forks have ended.

    Raises OSError if it cannot be created.
    """
    while True:
        path = tempfile.mkdtemp(prefix=prefix)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another launcher has removed it before it was opened
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(path):
            return Path(path)
        os.close(descriptor)  # another launcher removed it before it was locked


def remove_abandoned_folders(prefix: str) -> None:
    """Remove the folders of killed launchers of this user."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
