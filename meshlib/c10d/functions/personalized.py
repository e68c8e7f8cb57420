"""Collectives that give each pair of members data of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from meshlib.arrays.adapted import ListOf
from meshlib.c10d.functions.words import worded_as_method
from meshlib.calls.work import Work
from meshlib.job.current import Group, resolve_group
from transport.deadline import Timeout

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
@worded_as_method
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

    Arguments, result and errors: ``ProcessGroup.gather``.
    """
    return resolve_group(group).gather(
        tensor, gather_list, dst, async_op=async_op, group_dst=group_dst, timeout=timeout
    )


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
@worded_as_method
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

    Arguments, result and errors: ``ProcessGroup.scatter``.
    """
    return resolve_group(group).scatter(
        tensor, scatter_list, src, async_op=async_op, group_src=group_src, timeout=timeout
    )


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
@worded_as_method
def all_to_all(
    output_tensor_list: ListOf[Any],
    input_tensor_list: ListOf[Any],
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Copy member i's ``input_tensor_list[j]`` into member j's ``output_tensor_list[i]``.

    Arguments, result and errors: ``ProcessGroup.all_to_all``.
    """
    return resolve_group(group).all_to_all(
        output_tensor_list, input_tensor_list, async_op=async_op, timeout=timeout
    )


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
@worded_as_method
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    timeout: Timeout | None = None,
) -> Any:
    """Split ``input`` along dim 0, send part j to member j, join what comes in ``output``.

    Arguments, result and errors: ``ProcessGroup.all_to_all_single``.
    """
    return resolve_group(group).all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op=async_op, timeout=timeout
    )
