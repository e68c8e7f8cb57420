"""Written by tests/docs/functions.py from meshlib/_collectives/on_arrays.py."""

# A call without async_op matches the first two overloads of a function; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from meshlib._calls.work import Work
from meshlib._job.current import Group, resolve_group
from transport._operands.reduce_op import ReduceOp
from transport._waiting.deadline import Timeout

A = TypeVar("A")


@overload
def all_reduce(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def all_reduce(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def all_reduce(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def all_reduce(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce ``tensor`` over the members with ``op``; all members get the same bits.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
            with the result if writable.
        op: A ``ReduceOp`` that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The result, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX). With
        ``async_op``, a ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_reduce(tensor, op, async_op, timeout)


@overload
def scan(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def scan(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def scan(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def scan(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce ``tensor`` over members 0 to this one with ``op``, as ``MPI_Scan`` does.

    Member i gets the same bits as from an ``all_reduce`` among the members 0 to i. A member
    sends at most twice the bytes of ``tensor``.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
            with the result if writable.
        op: A ``ReduceOp`` other than AVG that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The result, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX). With
        ``async_op``, a ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).scan(tensor, op, async_op, timeout)


@overload
def exscan(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def exscan(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def exscan(
    tensor: A,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def exscan(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce ``tensor`` over the members before this one with ``op``, as ``MPI_Exscan`` does.

    Member i gets the same bits as from an ``all_reduce`` among the members 0 to i - 1. Member 0
    gets the neutral element of ``op``: 0 for SUM, 1 for PRODUCT, the largest value for MIN. For
    example, ``exscan`` of the members' counts returns each member's offset in the
    concatenation.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
            with the result if writable.
        op: A ``ReduceOp`` other than AVG that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The result, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX). With
        ``async_op``, a ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).exscan(tensor, op, async_op, timeout)


@overload
def broadcast(
    tensor: A,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_src: int | None = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def broadcast(
    tensor: A,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_src: int | None = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def broadcast(
    tensor: A,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Copy one member's ``tensor`` to all members.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
            on all members but the source, if writable.
        src: The global rank of the source.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        group_src: The source's rank in the group, instead of ``src``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The source's values, in ``tensor``, or in a new array if ``tensor`` is read-only (JAX).
        With ``async_op``, a ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).broadcast(tensor, src, async_op, group_src, timeout)


@overload
def reduce(
    tensor: A,
    dst: int | None = ...,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def reduce(
    tensor: A,
    dst: int | None = ...,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def reduce(
    tensor: A,
    dst: int | None = ...,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce ``tensor`` over the members with ``op``, into one member's ``tensor``.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
            with the result on the destination, if writable; unchanged elsewhere.
        dst: The global rank of the destination.
        op: A ``ReduceOp`` that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        group_dst: The destination's rank in the group, instead of ``dst``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        On the destination the result, elsewhere the unchanged ``tensor``. With ``async_op``, a
        ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce(tensor, dst, op, async_op, group_dst, timeout)
