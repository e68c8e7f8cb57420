"""Locks on ranges of a file, held by an open file description.

These locks (``F_OFD_*``) work between threads that opened the file separately, between processes in
different containers, and over NFS. The kernel releases them when their holder dies, so they also
show which users are alive.
"""

from __future__ import annotations

import errno
import fcntl
import struct
import time

from transport._errors import StorePlaceError
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import next_slice
from transport._waiting.spinning import PollBackoff

_FLOCK = struct.Struct("@hhqqi4x")
_PAUSES = 0.0005, 0.005
_BUSY = {errno.EAGAIN, errno.EACCES}


def acquire(fd: int, begin: int, length: int, deadline: Deadline, *, shared: bool = False) -> None:
    """Lock ``length`` bytes from ``begin`` (they need not exist); 0 means all that follow.

    Raises TimeoutError at the deadline, StorePlaceError if the file system has no locks.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    pauses = PollBackoff(*_PAUSES)
    while not _set(fd, kind, begin, length):
        if deadline.expired:
            raise TimeoutError(errno.ETIMEDOUT, f"locked by others for {deadline.seconds:g} s")
        time.sleep(next_slice(pauses.next()))


def release(fd: int, begin: int, length: int) -> None:
    """Release a range; bytes without a lock are ignored."""
    _set(fd, fcntl.F_UNLCK, begin, length)


def is_locked_by_others(fd: int, begin: int, length: int) -> bool:
    """Return whether another open file holds a lock in the range."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, 0, begin, length, 0)
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
    return _FLOCK.unpack(found)[0] != fcntl.F_UNLCK


def _set(fd: int, kind: int, begin: int, length: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, begin, length, 0))
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise StorePlaceError(
            f"the file system does not support locks: {error.strerror}; expected another path"
        ) from error
    return True
