"""Collectives on several arrays at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from meshlib.arrays.adapted import ListOf
from meshlib.c10d.functions.words import worded_as_method
from meshlib.calls.work import Work
from meshlib.job.current import Group, resolve_group
from transport.deadline import Timeout
from transport.operands.reduce_op import ReduceOp

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
@worded_as_method
def all_reduce_coalesced(
    tensors: ListOf[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce each of ``tensors`` over the members with ``op``, in one call.

    Arguments, result and errors: ``ProcessGroup.all_reduce_coalesced``.
    """
    return resolve_group(group).all_reduce_coalesced(
        tensors, op, async_op=async_op, timeout=timeout
    )


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
@worded_as_method
def all_gather_coalesced(
    output_tensor_lists: Sequence[ListOf[Any]],
    input_tensor_list: ListOf[Any],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather member i's ``input_tensor_list[j]`` into ``output_tensor_lists[i][j]``.

    Arguments, result and errors: ``ProcessGroup.all_gather_coalesced``.
    """
    return resolve_group(group).all_gather_coalesced(
        output_tensor_lists, input_tensor_list, async_op=async_op, timeout=timeout
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
@worded_as_method
def all_gather_into_tensor_coalesced(
    output_tensors: ListOf[Any],
    input_tensors: ListOf[Any],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather the members' ``input_tensors[j]`` into ``output_tensors[j]`` on all members.

    Arguments, result and errors: ``ProcessGroup.all_gather_into_tensor_coalesced``.
    """
    return resolve_group(group).all_gather_into_tensor_coalesced(
        output_tensors, input_tensors, async_op=async_op, timeout=timeout
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
@worded_as_method
def reduce_scatter_tensor_coalesced(
    output_tensors: ListOf[Any],
    input_tensors: ListOf[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce the members' ``input_tensors[j]``; member i gets part i in ``output_tensors[j]``.

    Arguments, result and errors: ``ProcessGroup.reduce_scatter_tensor_coalesced``.
    """
    return resolve_group(group).reduce_scatter_tensor_coalesced(
        output_tensors, input_tensors, op, async_op=async_op, timeout=timeout
    )
