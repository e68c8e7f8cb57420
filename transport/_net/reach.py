"""The distinction between a peer that closed its connection and an unreachable one."""

from __future__ import annotations

import errno

_UNREACHABLE = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
}


def is_out_of_reach(error: object) -> bool:
    """Return whether ``error`` means that the other end was silent for too long or has no route.

    Such a peer may be alive. A peer that hangs up, or refuses a connection, has ended.
    """
    return isinstance(error, OSError) and (
        error.errno in _UNREACHABLE or (isinstance(error, TimeoutError) and error.errno is None)
    )
