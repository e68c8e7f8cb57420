"""Messages from one member of a group to another."""

from __future__ import annotations

from typing import Any

from meshlib.c10d.functions.words import worded_as_method
from meshlib.calls.work import Work
from meshlib.job.current import Group, resolve_group
from transport.deadline import Timeout


@worded_as_method
def send(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Send ``tensor`` to one member; return when it may be reused.

    Arguments, result and errors: ``ProcessGroup.send``.
    """
    resolve_group(group).send(tensor, dst, tag, group_dst, timeout=timeout)


@worded_as_method
def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> int:
    """Receive into ``tensor`` what one member sends.

    Arguments, result and errors: ``ProcessGroup.recv``.
    """
    return resolve_group(group).recv(tensor, src, tag, group_src, timeout=timeout)


@worded_as_method
def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work[Any] | Any:
    """Begin to send ``tensor`` to one member.

    Arguments, result and errors: ``ProcessGroup.isend``.
    """
    return resolve_group(group).isend(tensor, dst, tag, group_dst, timeout=timeout)


@worded_as_method
def irecv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work[Any] | Any:
    """Begin to receive into ``tensor`` what one member sends.

    Arguments, result and errors: ``ProcessGroup.irecv``.
    """
    return resolve_group(group).irecv(tensor, src, tag, group_src, timeout=timeout)
