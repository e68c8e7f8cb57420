"""Written by tests/docs/functions.py from meshlib/_collectives/personalized.py."""

# A call without async_op matches the first two overloads of a function; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from meshlib._arrays.adapted import ListOf
from meshlib._calls.work import Work
from meshlib._job.current import Group, resolve_group
from transport._waiting.deadline import Timeout

A = TypeVar("A")


@overload
def gather(
    tensor: A,
    gather_list: ListOf[A] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> list[A] | None: ...
@overload
def gather(
    tensor: A,
    gather_list: ListOf[A] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> Work[list[A] | None]: ...
@overload
def gather(
    tensor: A,
    gather_list: ListOf[A] | None = ...,
    dst: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: int | None = ...,
    timeout: Timeout | None = ...,
) -> list[A] | Work[list[A] | None] | None: ...
def gather(
    tensor: Any,
    gather_list: ListOf[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Gather member i's ``tensor`` into ``gather_list[i]`` of one member.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Its size may differ by member.
        gather_list: On the destination, one array for each member, in group order, with the
            size and dtype of its ``tensor``; None elsewhere.
        dst: The global rank of the destination; by default that of group rank 0.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        group_dst: The destination's rank in the group, instead of ``dst``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The list of gathered arrays on the destination, None elsewhere. With ``async_op``, a
        ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).gather(tensor, gather_list, dst, async_op, group_dst, timeout)


@overload
def scatter(
    tensor: A,
    scatter_list: ListOf[Any] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    group_src: int | None = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def scatter(
    tensor: A,
    scatter_list: ListOf[Any] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    group_src: int | None = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def scatter(
    tensor: A,
    scatter_list: ListOf[Any] | None = ...,
    src: int | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: int | None = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def scatter(
    tensor: Any,
    scatter_list: ListOf[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Copy ``scatter_list[i]`` of one member into member i's ``tensor``.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Its size may differ by member.
        scatter_list: On the source, one array for each member, in group order, with the size
            and dtype of its ``tensor``; None elsewhere.
        src: The global rank of the source; by default that of group rank 0.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        group_src: The source's rank in the group, instead of ``src``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``tensor``, or a new array if it is read-only (JAX). With ``async_op``, a ``Work`` with
        that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).scatter(tensor, scatter_list, src, async_op, group_src, timeout)


@overload
def all_to_all(
    output_tensor_list: ListOf[A],
    input_tensor_list: ListOf[Any],
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> list[A]: ...
@overload
def all_to_all(
    output_tensor_list: ListOf[A],
    input_tensor_list: ListOf[Any],
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[list[A]]: ...
@overload
def all_to_all(
    output_tensor_list: ListOf[A],
    input_tensor_list: ListOf[Any],
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> list[A] | Work[list[A]]: ...
def all_to_all(
    output_tensor_list: ListOf[Any],
    input_tensor_list: ListOf[Any],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Copy member i's ``input_tensor_list[j]`` into member j's ``output_tensor_list[i]``.

    Args:
        output_tensor_list: One array for each member, in group order, with the size that the
            member sends. No array overlaps another one or an input.
        input_tensor_list: One array for each member: NumPy, JAX or CuPy arrays or buffers, of
            any shapes and one dtype (numeric, bool, or one of ml_dtypes' floats).
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The list of outputs. With ``async_op``, a ``Work`` with that result. None on a rank
        outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_to_all(output_tensor_list, input_tensor_list, async_op, timeout)


@overload
def all_to_all_single(
    output: A,
    input: Any,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> A: ...
@overload
def all_to_all_single(
    output: A,
    input: Any,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[A]: ...
@overload
def all_to_all_single(
    output: A,
    input: Any,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> A | Work[A]: ...
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Split ``input`` along dim 0, send part j to member j, join received parts in ``output``.

    Args:
        output: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. It does not overlap ``input``.
        input: An array of ``output``'s dtype.
        output_split_sizes: The number of rows of ``output`` from each member; by default equal
            parts.
        input_split_sizes: The number of rows of ``input`` for each member; by default equal
            parts.
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
    return resolve_group(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op, timeout
    )
