"""Collectives on arrays, and the barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib.job.current import Group, resolve_group
from transport.deadline import Timeout
from transport.reduce_op import ReduceOp


def all_reduce(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce ``tensor`` over the members with ``op``; all get the same bits.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
            with the result where it can be written to.
        op: A ``ReduceOp`` that means something for the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The result, in ``tensor`` or in a new array if that cannot be written to (JAX). With
        ``async_op``, a ``Work`` whose ``result()`` that is. None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_reduce(tensor, op, async_op, timeout=timeout)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Copy ``tensor`` of one member to all.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. Overwritten
            on all but the source, where it can be written to.
        src: The global rank of the source.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        group_src: The source's rank in the group, instead of ``src``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The source's values, in ``tensor`` or in a new array if that cannot be written to (JAX).
        With ``async_op``, a ``Work`` whose ``result()`` that is. None on a rank that is no
        member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).broadcast(tensor, src, async_op, group_src, timeout=timeout)


def reduce(
    tensor: Any,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce ``tensor`` over the members with ``op``, into that of one of them.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Size and dtype are the same on every member. The
            destination's is overwritten with the result where it can be written to; the others'
            are left as they are.
        dst: The global rank of the destination.
        op: A ``ReduceOp`` that means something for the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        group_dst: The destination's rank in the group, instead of ``dst``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        On the destination the result, elsewhere ``tensor`` as it was. With ``async_op``, a
        ``Work`` whose ``result()`` that is. None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce(tensor, dst, op, async_op, group_dst, timeout=timeout)


def all_gather(
    tensor_list: Sequence[Any],
    tensor: Any,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather member i's ``tensor`` into ``tensor_list[i]`` on all members.

    Args:
        tensor_list: One array for each member, in group order, of its size and of ``tensor``'s
            dtype. They do not overlap each other; ``tensor_list[rank]`` may be ``tensor``.
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. Its size may differ by member.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The list of what was gathered. With ``async_op``, a ``Work`` whose ``result()`` that is.
        None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather(tensor_list, tensor, async_op, timeout=timeout)


def all_gather_into_tensor(
    output_tensor: Any,
    input_tensor: Any,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather the members' ``input_tensor`` into one ``output_tensor`` on all members.

    Args:
        output_tensor: ``size()`` times the elements of ``input_tensor``, of its dtype: joined
            along dim 0 or stacked in a new first dim, which is the same memory.
        input_tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype,
            bool, or one of ml_dtypes' floats. Size and dtype are the same on every member. May
            be this member's part of ``output_tensor``.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output_tensor``, or a new array if that cannot be written to (JAX). With ``async_op``,
        a ``Work`` whose ``result()`` that is. None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather_into_tensor(
        output_tensor, input_tensor, async_op, timeout=timeout
    )


def all_gather_single(
    output_tensor: Any,
    input_tensor: Any,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather the members' ``input_tensor`` into one ``output_tensor`` on all members.

    Args:
        output_tensor: ``size()`` times the elements of ``input_tensor``, of its dtype: joined
            along dim 0 or stacked in a new first dim, which is the same memory.
        input_tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype,
            bool, or one of ml_dtypes' floats. Size and dtype are the same on every member. May
            be this member's part of ``output_tensor``.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output_tensor``, or a new array if that cannot be written to (JAX). With ``async_op``,
        a ``Work`` whose ``result()`` that is. None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather_single(
        output_tensor, input_tensor, async_op, timeout=timeout
    )


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce the members' ``input_list[i]`` with ``op`` into member i's ``output``.

    Args:
        output: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. It has the size of ``input_list[rank]``, which it may be;
            it overlaps no other.
        input_list: One array of ``output``'s dtype for each member, in group order. Sizes may
            differ by place, not by member.
        op: A ``ReduceOp`` that means something for the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output``, or a new array if that cannot be written to (JAX). With ``async_op``, a
        ``Work`` whose ``result()`` that is. None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce_scatter(output, input_list, op, async_op, timeout=timeout)


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
        input: ``size()`` times the elements of ``output``, of its dtype: the parts joined along
            dim 0 or stacked in a new first dim.
        op: A ``ReduceOp`` that means something for the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output``, or a new array if that cannot be written to (JAX). With ``async_op``, a
        ``Work`` whose ``result()`` that is. None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce_scatter_tensor(output, input, op, async_op, timeout=timeout)


def reduce_scatter_single(
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
        input: ``size()`` times the elements of ``output``, of its dtype: the parts joined along
            dim 0 or stacked in a new first dim.
        op: A ``ReduceOp`` that means something for the dtype.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        ``output``, or a new array if that cannot be written to (JAX). With ``async_op``, a
        ``Work`` whose ``result()`` that is. None on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).reduce_scatter_single(output, input, op, async_op, timeout=timeout)


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Return when every member has called.

    Args:
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        async_op: Return a ``Work`` at once, not the result.
        device_ids: Accepted for c10d's sake.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        None; with ``async_op`` a ``Work``, except on a rank that is no member.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names who has not come.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).barrier(async_op, timeout)


def monitored_barrier(
    group: Group = None,
    timeout: Timeout | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Return when every member has called; past ``timeout`` say who has not.

    Args:
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.
        wait_all_ranks: Accepted for c10d's sake: all missing ranks are named either way.

    Raises:
        TypeError, ValueError: For a wrong argument, before any byte moves; the group stays
            usable.
        CollectiveMismatchError: On every member, if they make different calls.
        CollectiveTimeoutError: On every member, past the deadline; names all who have not come,
            and where each stands.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    resolve_group(group).monitored_barrier(timeout, wait_all_ranks)
