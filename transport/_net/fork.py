"""Keeps a forked child from using what it inherits.

A connection or a lock ends when the last copy of its descriptor is closed. So a copy in a child
would hide the parent's death from its peers. And a child's call on its parent's groups or stores
would be taken for the parent's. So objects of one process are closed in its forks, and refuse calls
there. (Children started with exec inherit nothing of ours. Forks that bypass Python are not seen.)
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Closable(Protocol):
    """Anything that is released by ``close()``."""

    def close(self) -> None:
        """Release it."""
        ...


# Inherently one a process, as the hook is that reads it.
_OWNED: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def in_forked_children(owned: T, leave: Callable[[T], object]) -> None:
    """Have ``leave(owned)`` called in every child that this process forks without exec.

    It must take no lock of the parent's: a thread that is not in the child may have held it.
    """
    _OWNED[owned] = leave


def close_in_forked_children(closable: Closable) -> None:
    """Have ``closable`` closed in every child that this process forks without exec. It must be
    something that weak references can refer to.
    """
    in_forked_children(closable, _close)


class _ProcessId:
    """The number of this process: a system call less wherever it is noted."""

    pid = os.getpid()


def own_pid() -> int:
    """Return the number of this process."""
    return _ProcessId.pid


def refusal(what: str, pid: int, instead: str) -> str | None:
    """Return why ``what``, which belongs to process ``pid``, cannot be used in this one.

    ``instead`` completes "expected …". None if this is that process.
    """
    here = os.getpid()
    if here == pid:
        return None
    return (
        f"{what} belongs to process {pid} and cannot be used in its fork, process {here}; "
        f"expected {instead}"
    )


def _close(closable: Closable) -> None:
    with contextlib.suppress(OSError):
        closable.close()


def _leave_all() -> None:
    _ProcessId.pid = os.getpid()
    for owned, leave in list(_OWNED.items()):
        leave(owned)


os.register_at_fork(after_in_child=_leave_all)
