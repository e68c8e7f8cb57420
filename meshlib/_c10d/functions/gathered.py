"""Written by tests/docs/functions.py from meshlib/_collectives/gathered.py."""

# A call without async_op matches the first two overloads of a function; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from meshlib._arrays.adapted import ListOf
from meshlib._calls.work import Work
from meshlib._job.current import Group, resolve_group
from transport._operands.reduce_op import ReduceOp
from transport._waiting.deadline import Timeout

A = TypeVar("A")


@overload
def all_gather(
    tensor_list: ListOf[A],
    tensor: Any,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> list[A]: ...
@overload
def all_gather(
    tensor_list: ListOf[A],
    tensor: Any,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[list[A]]: ...
@overload
def all_gather(
    tensor_list: ListOf[A],
    tensor: Any,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> list[A] | Work[list[A]]: ...
def all_gather(
    tensor_list: ListOf[Any],
    tensor: Any,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather member i's ``tensor`` into ``tensor_list[i]`` on all members.

    Args:
        tensor_list: One array for each member, in group order, with the size of that member's
            ``tensor`` and its dtype. The arrays do not overlap; ``tensor_list[rank]`` may be
            ``tensor``.
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Its size may differ by member.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The list of gathered arrays. With ``async_op``, a ``Work`` with that result. None on a
        rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather(tensor_list, tensor, async_op, timeout)


@overload
def all_gather_into_tensor(
    output_tensor: A,
    input_tensor: Any,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def all_gather_into_tensor(
    output_tensor: A,
    input_tensor: Any,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def all_gather_into_tensor(
    output_tensor: A,
    input_tensor: Any,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def all_gather_into_tensor(
    output_tensor: Any,
    input_tensor: Any,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather the members' ``input_tensor`` into one ``output_tensor`` on all members.

    Args:
        output_tensor: An array of ``input_tensor``'s dtype with ``size()`` times its elements:
            the members' arrays, concatenated along dim 0 or stacked in a new first dim.
        input_tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype,
            bool, or one of ml_dtypes' floats. Size and dtype are the same on every member. May
            be this member's part of ``output_tensor``.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output_tensor``, or a new array if it is read-only (JAX). With ``async_op``, a
        ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather_into_tensor(
        output_tensor, input_tensor, async_op, timeout
    )


@overload
def reduce_scatter(
    output: A,
    input_list: ListOf[Any],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def reduce_scatter(
    output: A,
    input_list: ListOf[Any],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def reduce_scatter(
    output: A,
    input_list: ListOf[Any],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def reduce_scatter(
    output: Any,
    input_list: ListOf[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce the members' ``input_list[i]`` with ``op`` into member i's ``output``.

    Args:
        output: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. It has the size of ``input_list[rank]``. It may be that
            array, but overlaps no other input.
        input_list: One array of ``output``'s dtype for each member, in group order. Sizes may
            differ within the list, but not between members.
        op: A ``ReduceOp`` that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output``, or a new array if it is read-only (JAX). With ``async_op``, a ``Work`` with
        that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce_scatter(output, input_list, op, async_op, timeout)


@overload
def reduce_scatter_tensor(
    output: A,
    input: Any,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def reduce_scatter_tensor(
    output: A,
    input: Any,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def reduce_scatter_tensor(
    output: A,
    input: Any,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce the members' ``input`` with ``op``; part i goes into member i's ``output``.

    Args:
        output: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. May be this
            member's part of ``input``.
        input: An array of the dtype of ``output``, with ``size()`` times its elements. The
            parts are concatenated along dim 0 or stacked in a new first dim.
        op: A ``ReduceOp`` that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output``, or a new array if it is read-only (JAX). With ``async_op``, a ``Work`` with
        that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce_scatter_tensor(output, input, op, async_op, timeout)


all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor
