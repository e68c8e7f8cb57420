"""Written by tests/docs/functions.py from meshlib/_collectives/gather_single.py."""

# A call without async_op matches the first two overloads of a function; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from meshlib._calls.work import Work
from meshlib._job.current import Group, resolve_group
from transport._waiting.deadline import Timeout

A = TypeVar("A")


@overload
def gather_single(
    tensor: A,
    gather_tensor: A | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> A | None: ...
@overload
def gather_single(
    tensor: A,
    gather_tensor: A | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> Work[A | None]: ...
@overload
def gather_single(
    tensor: A,
    gather_tensor: A | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A | None] | None: ...
def gather_single(
    tensor: Any,
    gather_tensor: Any = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Gather the members' ``tensor`` into one array of one member.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member.
        gather_tensor: On the destination an array of that dtype with ``size()`` times the
            elements: the members' arrays concatenated or stacked. None elsewhere.
        dst: The global rank of the destination; by default that of group rank 0.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        group_dst: The destination's rank in the group, instead of ``dst``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        On the destination ``gather_tensor``, or a new array if it is read-only (JAX); None
        elsewhere. With ``async_op``, a ``Work`` with that result. None on a rank outside the
        group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).gather_single(
        tensor, gather_tensor, dst, async_op, group_dst, timeout
    )


gather_into_tensor = gather_single
