"""The launcher's folder for temporary files: it goes with the launcher, whatever ends that.

A launcher holds a lock on its folder, and so does its guardian: the descriptor is inherited. The
kernel releases the lock when both have ended. Where neither could remove the folder, because both
were killed, the next launcher of the same user does.
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

    Raises OSError where it cannot be made.
    """
    while True:
        path = tempfile.mkdtemp(prefix=prefix)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another launcher has removed it before it was opened
        with suppress(OSError):  # a file system without locks, where no launcher gets one
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.isdir(path):
            return Path(path)
        os.close(descriptor)  # another launcher removed it before it was locked


def remove_abandoned_folders(prefix: str) -> None:
    """Remove the folders that launchers of this user have left that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or gone
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
