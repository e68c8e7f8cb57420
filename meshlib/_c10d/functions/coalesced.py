"""Written by tests/docs/functions.py from meshlib/_collectives/coalesced.py."""

# A call without async_op matches the first two overloads of a function; the first one applies.
# pyright: reportOverlappingOverload=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from meshlib._arrays.adapted import ListOf
from meshlib._calls.work import Work
from meshlib._job.current import Group, resolve_group
from transport._operands.reduce_op import ReduceOp
from transport._waiting.deadline import Timeout

A = TypeVar("A")


@overload
def all_reduce_coalesced(
    tensors: ListOf[A],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> list[A]: ...
@overload
def all_reduce_coalesced(
    tensors: ListOf[A],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[list[A]]: ...
@overload
def all_reduce_coalesced(
    tensors: ListOf[A],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> list[A] | Work[list[A]]: ...
def all_reduce_coalesced(
    tensors: ListOf[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce each of ``tensors`` over the members with ``op``, in one call.

    Args:
        tensors: NumPy, JAX or CuPy arrays or buffers that do not overlap, of any shapes and one
            dtype (numeric, bool, or one of ml_dtypes' floats). Their sizes are the same on
            every member. Overwritten if writable.
        op: A ``ReduceOp`` that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The list of results. With ``async_op``, a ``Work`` with that result. None on a rank
        outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_reduce_coalesced(tensors, op, async_op, timeout)


@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[ListOf[A]],
    input_tensor_list: ListOf[Any],
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> list[list[A]]: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[ListOf[A]],
    input_tensor_list: ListOf[Any],
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[list[list[A]]]: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: Sequence[ListOf[A]],
    input_tensor_list: ListOf[Any],
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> list[list[A]] | Work[list[list[A]]]: ...
def all_gather_coalesced(
    output_tensor_lists: Sequence[ListOf[Any]],
    input_tensor_list: ListOf[Any],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather member i's ``input_tensor_list[j]`` into ``output_tensor_lists[i][j]``.

    Args:
        output_tensor_lists: For each member, in group order, one array for each of its inputs.
            No array overlaps another one or an input.
        input_tensor_list: NumPy, JAX or CuPy arrays or buffers, of any shapes and one dtype
            (numeric, bool, or one of ml_dtypes' floats). Their number and sizes may differ by
            member.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The lists of gathered arrays. With ``async_op``, a ``Work`` with that result. None on
        a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather_coalesced(
        output_tensor_lists, input_tensor_list, async_op, timeout
    )


@overload
def all_gather_into_tensor_coalesced(
    output_tensors: ListOf[A],
    input_tensors: ListOf[Any],
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> list[A]: ...
@overload
def all_gather_into_tensor_coalesced(
    output_tensors: ListOf[A],
    input_tensors: ListOf[Any],
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[list[A]]: ...
@overload
def all_gather_into_tensor_coalesced(
    output_tensors: ListOf[A],
    input_tensors: ListOf[Any],
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> list[A] | Work[list[A]]: ...
def all_gather_into_tensor_coalesced(
    output_tensors: ListOf[Any],
    input_tensors: ListOf[Any],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather the members' ``input_tensors[j]`` into ``output_tensors[j]`` on all members.

    Args:
        output_tensors: Writable arrays of one dtype, as many as ``input_tensors``; each has
            ``size()`` times the elements of its input, concatenated along dim 0 or stacked.
        input_tensors: Arrays of that dtype; their shapes are the same on every member.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline, in seconds or as a timedelta; by default the group's.

    Returns:
        ``output_tensors``, with new arrays in place of read-only ones. With ``async_op``, a
        ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather_into_tensor_coalesced(
        output_tensors, input_tensors, async_op, timeout
    )


@overload
def reduce_scatter_tensor_coalesced(
    output_tensors: ListOf[A],
    input_tensors: ListOf[Any],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[False] = ...,
    timeout: Timeout | None = ...,
) -> list[A]: ...
@overload
def reduce_scatter_tensor_coalesced(
    output_tensors: ListOf[A],
    input_tensors: ListOf[Any],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: Literal[True] = ...,
    timeout: Timeout | None = ...,
) -> Work[list[A]]: ...
@overload
def reduce_scatter_tensor_coalesced(
    output_tensors: ListOf[A],
    input_tensors: ListOf[Any],
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    timeout: Timeout | None = ...,
) -> list[A] | Work[list[A]]: ...
def reduce_scatter_tensor_coalesced(
    output_tensors: ListOf[Any],
    input_tensors: ListOf[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce the members' ``input_tensors[j]``; member i gets part i in ``output_tensors[j]``.

    Args:
        output_tensors: Writable arrays of any shapes and one dtype, the same on every member.
        input_tensors: As many arrays of that dtype; each has ``size()`` times the elements of
            its output, concatenated along dim 0 or stacked.
        op: A ``ReduceOp`` that supports the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once instead of the result.
        timeout: The call's deadline, in seconds or as a timedelta; by default the group's.

    Returns:
        ``output_tensors``, with new arrays in place of read-only ones. With ``async_op``, a
        ``Work`` with that result. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent. Members with valid
            arguments raise CollectiveMismatchError; if there are none, the group stays usable.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce_scatter_tensor_coalesced(
        output_tensors, input_tensors, op, async_op, timeout
    )
