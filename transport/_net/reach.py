"""Telling a connection that the other end has closed from one that cannot be reached."""

from __future__ import annotations

import errno

_NO_WAY = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
}


def is_out_of_reach(error: object) -> bool:
    """Return whether ``error`` says that nothing came of the other end for too long, or that there
    is no way to it: its end is not known then. One that hangs up, or refuses, has ended.
    """
    return isinstance(error, OSError) and (
        error.errno in _NO_WAY or (isinstance(error, TimeoutError) and error.errno is None)
    )
