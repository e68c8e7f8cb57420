"""Prevents a forked child from using inherited connections, groups and stores.

A connection or a lock ends when the last copy of its descriptor is closed, so a copy in a child
would hide the parent's death from its peers. A child's calls on its parent's groups or stores would
look like the parent's. So objects of one process are closed in its forks, and refuse calls there.
Children started with exec inherit no descriptor. Forks that bypass Python are not detected.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Closable(Protocol):
    """An object that ``close()`` releases."""

    def close(self) -> None:
        """Release the object."""
        ...


# One per process, like the hook that reads it.
_OWNED: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def in_forked_children(owned: T, leave: Callable[[T], object]) -> None:
    """Call ``leave(owned)`` in every child that this process forks without exec.

    It must not acquire a lock of the parent's: a thread that the child lacks may have held it.
    """
    _OWNED[owned] = leave


def close_in_forked_children(closable: Closable) -> None:
    """Close ``closable``, which must support weak references, in every child that this process
    forks without exec.
    """
    in_forked_children(closable, _close)


class _ProcessId:
    """This process's id, cached to save a system call."""

    pid = os.getpid()


def own_pid() -> int:
    """Return this process's id, without a system call."""
    return _ProcessId.pid


def refusal(what: str, pid: int, instead: str) -> str | None:
    """Return why ``what``, which belongs to process ``pid``, cannot be used in this one.

    ``instead`` completes "expected …". None if ``pid`` is this process.
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
