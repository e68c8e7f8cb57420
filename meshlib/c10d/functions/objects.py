"""Collectives and messages of Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib.c10d.functions.words import worded_as_method
from meshlib.job.current import Group, resolve_group
from transport.deadline import Timeout


@worded_as_method
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> list[Any]:
    """Replace the objects in ``object_list`` by those of one member.

    Arguments, result and errors: ``ProcessGroup.broadcast_object_list``.
    """
    return resolve_group(group).broadcast_object_list(
        object_list, src, device, group_src, timeout=timeout
    )


@worded_as_method
def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, timeout: Timeout | None = None
) -> list[Any]:
    """Put member i's ``obj`` into ``object_list[i]`` on all members.

    Arguments, result and errors: ``ProcessGroup.all_gather_object``.
    """
    return resolve_group(group).all_gather_object(object_list, obj, timeout)


@worded_as_method
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> list[Any] | None:
    """Put member i's ``obj`` into ``object_gather_list[i]`` of one member.

    Arguments, result and errors: ``ProcessGroup.gather_object``.
    """
    return resolve_group(group).gather_object(obj, object_gather_list, dst, group_dst, timeout)


@worded_as_method
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Give member i entry i of one member's list, as ``scatter_object_output_list[0]``.

    Arguments, result and errors: ``ProcessGroup.scatter_object_list``.
    """
    return resolve_group(group).scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, src, group_src, timeout
    )


@worded_as_method
def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Send the objects in ``object_list`` to one member.

    Arguments, result and errors: ``ProcessGroup.send_object_list``.
    """
    resolve_group(group).send_object_list(object_list, dst, device, group_dst, timeout=timeout)


@worded_as_method
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> int:
    """Replace the objects in ``object_list`` by those that one member sends.

    Arguments, result and errors: ``ProcessGroup.recv_object_list``.
    """
    return resolve_group(group).recv_object_list(
        object_list, src, device, group_src, timeout=timeout
    )
