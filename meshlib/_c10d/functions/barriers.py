"""Written by tests/docs/functions.py from meshlib/_collectives/collectives.py."""

# A call without async_op matches the first two overloads of a function; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from meshlib._calls.work import Work
from meshlib._job.current import Group, resolve_group
from transport._waiting.deadline import Timeout


@overload
def barrier(
    group: Group = ...,
    async_op: Literal[False] = ...,
    device_ids: Sequence[int] | None = ...,
    timeout: Timeout | None = ...,
) -> None: ...
@overload
def barrier(
    group: Group = ...,
    async_op: Literal[True] = ...,
    device_ids: Sequence[int] | None = ...,
    timeout: Timeout | None = ...,
) -> Work[None]: ...
@overload
def barrier(
    group: Group = ...,
    async_op: bool = ...,
    device_ids: Sequence[int] | None = ...,
    timeout: Timeout | None = ...,
) -> Work[None] | None: ...
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Return when every member has called.

    Args:
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        device_ids: Accepted for compatibility with c10d.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        None; with ``async_op`` a ``Work``, except on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if none are valid, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).barrier(async_op, device_ids, timeout)


def monitored_barrier(
    group: Group = None, timeout: Timeout | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when every member has called; past ``timeout``, name the missing ranks.

    Args:
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.
        wait_all_ranks: Accepted for compatibility with c10d; the error always names all missing
            ranks.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if none are valid, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names all missing ranks,
            and the state of each rank.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    resolve_group(group).monitored_barrier(timeout, wait_all_ranks)
