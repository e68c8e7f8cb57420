"""The state of a group, for libraries above meshlib."""

from __future__ import annotations

from collections.abc import Callable

from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._recording.log import RankLog
from transport._errors import DistError


def on_failure(group: ProcessGroup, listener: Callable[[DistError], object]) -> None:
    """Call ``listener(error)`` when ``group`` breaks, or at once if it is broken, in any thread.

    The listener must return soon, and may be called more than once.
    """
    call_queue_of(group).state.on_failure(listener)


def failure_of(group: ProcessGroup, timeout: float = 0.0) -> DistError | None:
    """Return the error that broke ``group``; None if it is unbroken after ``timeout`` seconds."""
    return call_queue_of(group).state.await_failure(timeout)


def is_usable(group: ProcessGroup) -> bool:
    """Return whether ``group`` can be called: it is neither broken nor destroyed."""
    return call_queue_of(group).state.usable


def is_idle(group: ProcessGroup) -> bool:
    """Return whether this rank has neither running nor queued calls on ``group``."""
    return call_queue_of(group).streams.is_idle()


def fail(group: ProcessGroup, error: DistError) -> None:
    """Break ``group`` on this rank alone: running and later calls raise ``error``.

    ``ProcessGroup.abort`` breaks a group on all its members.
    """
    call_queue_of(group).failure.fail(error)


def log_of(group: ProcessGroup) -> RankLog:
    """Return the logger ``meshlib``, whose records have this rank's number."""
    return call_queue_of(group).context.log
