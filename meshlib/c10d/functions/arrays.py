"""Collectives on arrays, and the barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from meshlib.c10d.functions.words import worded_as_method
from meshlib.calls.work import Work
from meshlib.job.current import Group, resolve_group
from transport.deadline import Timeout
from transport.operands.reduce_op import ReduceOp

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
@worded_as_method
def all_reduce(
    tensor: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce ``tensor`` over the members with ``op``; all get the same bits.

    Arguments, result and errors: ``ProcessGroup.all_reduce``.
    """
    return resolve_group(group).all_reduce(tensor, op, async_op=async_op, timeout=timeout)


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
@worded_as_method
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Copy ``tensor`` of one member to all.

    Arguments, result and errors: ``ProcessGroup.broadcast``.
    """
    return resolve_group(group).broadcast(
        tensor, src, async_op=async_op, group_src=group_src, timeout=timeout
    )


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
@worded_as_method
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

    Arguments, result and errors: ``ProcessGroup.reduce``.
    """
    return resolve_group(group).reduce(
        tensor, dst, op, async_op=async_op, group_dst=group_dst, timeout=timeout
    )


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
@worded_as_method
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Return when every member has called.

    Arguments, result and errors: ``ProcessGroup.barrier``.
    """
    return resolve_group(group).barrier(async_op=async_op, timeout=timeout)


@worded_as_method
def monitored_barrier(
    group: Group = None,
    timeout: Timeout | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Return when every member has called; past ``timeout`` say who has not.

    Arguments, result and errors: ``ProcessGroup.monitored_barrier``.
    """
    resolve_group(group).monitored_barrier(timeout, wait_all_ranks)
