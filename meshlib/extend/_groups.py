"""What libraries ask of a group, and have it do, besides its calls."""

from __future__ import annotations

from collections.abc import Callable

from meshlib._groups.process_group import ProcessGroup
from meshlib._recording.log import RankLog
from transport._errors import DistError


def derived_group(group: ProcessGroup, purpose: str, desc: str = "") -> ProcessGroup:
    """Return the group of the same ranks for calls of ``purpose``, counted apart.

    For calls that come in an order of their own. There is one for each purpose, with the backends
    and the deadline of ``group``; it is closed and aborted with ``group``, and its failures are its
    own. Making it costs no message. ``desc`` is its name in messages. Raises ValueError after
    ``group`` was destroyed, and on a rank that is no member.
    """
    return group.companion(purpose, desc)


def on_failure(group: ProcessGroup, listener: Callable[[DistError], object]) -> None:
    """Call ``listener(error)`` when ``group`` breaks, at once if it has, in any thread.

    The listener must return soon, and may be called more than once.
    """
    group.on_failure(listener)


def failure_of(group: ProcessGroup, timeout: float = 0.0) -> DistError | None:
    """Return the error that broke ``group``; None if it has not within ``timeout`` seconds."""
    return group.await_failure(timeout)


def is_usable(group: ProcessGroup) -> bool:
    """Return whether calls can be made on ``group``: it is neither broken nor destroyed."""
    return group.state.usable


def is_idle(group: ProcessGroup) -> bool:
    """Return whether no call of this rank is under way on ``group``, and none is queued."""
    return group.call_queue.streams.is_idle()


def fail(group: ProcessGroup, error: DistError) -> None:
    """Break ``group`` on this rank alone: calls under way and all later ones raise ``error``.

    ``ProcessGroup.abort`` breaks a group on all its members.
    """
    group.fail(error)


def log_of(group: ProcessGroup) -> RankLog:
    """Return the logger ``meshlib``, whose records have this rank's number."""
    return group.context.log
