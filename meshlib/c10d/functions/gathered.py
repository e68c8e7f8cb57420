"""all_gather and reduce_scatter, of lists and of whole arrays."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from meshlib.arrays.adapted import ListOf
from meshlib.c10d.functions.words import worded_as_method
from meshlib.calls.work import Work
from meshlib.job.current import Group, resolve_group
from transport.deadline import Timeout
from transport.operands.reduce_op import ReduceOp

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
@worded_as_method
def all_gather(
    tensor_list: ListOf[Any],
    tensor: Any,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather member i's ``tensor`` into ``tensor_list[i]`` on all members.

    Arguments, result and errors: ``ProcessGroup.all_gather``.
    """
    return resolve_group(group).all_gather(tensor_list, tensor, async_op=async_op, timeout=timeout)


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
@worded_as_method
def all_gather_into_tensor(
    output_tensor: Any,
    input_tensor: Any,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Gather the members' ``input_tensor`` into one ``output_tensor`` on all members.

    Arguments, result and errors: ``ProcessGroup.all_gather_into_tensor``.
    """
    return resolve_group(group).all_gather_into_tensor(
        output_tensor, input_tensor, async_op=async_op, timeout=timeout
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
@worded_as_method
def reduce_scatter(
    output: Any,
    input_list: ListOf[Any],
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce the members' ``input_list[i]`` with ``op`` into member i's ``output``.

    Arguments, result and errors: ``ProcessGroup.reduce_scatter``.
    """
    return resolve_group(group).reduce_scatter(
        output, input_list, op, async_op=async_op, timeout=timeout
    )


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
@worded_as_method
def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Reduce the members' ``input`` with ``op``; part i goes into member i's ``output``.

    Arguments, result and errors: ``ProcessGroup.reduce_scatter_tensor``.
    """
    return resolve_group(group).reduce_scatter_tensor(
        output, input, op, async_op=async_op, timeout=timeout
    )


# The names that c10d gives to these two since it has others with "tensor" in them.
all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor
