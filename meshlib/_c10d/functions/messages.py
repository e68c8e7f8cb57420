"""Written by tests/docs/functions.py from meshlib/_collectives/point_to_point.py."""

from __future__ import annotations

from typing import Any, TypeVar

from meshlib._calls.work import Work
from meshlib._job.current import Group, resolve_group
from transport._waiting.deadline import Timeout

A = TypeVar("A")


def send(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> None:
    """Send ``tensor`` to one member; return when ``tensor`` may be changed.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. The receiver's array has the same size and dtype.
        dst: The global rank of the destination.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
            arrive in order.
        group_dst: The destination's rank in the group, instead of ``dst``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
            usable.
        CollectiveTimeoutError: Past the deadline; names the other end. It breaks the group.
        RankFailedError: If the other end dies or leaves.
    """
    resolve_group(group).send(tensor, dst, tag, group_dst, timeout)


def isend(
    tensor: Any,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> Work[None]:
    """Begin to send ``tensor`` to one member.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. The receiver's array has the same size and dtype. It must
            not change until the ``Work`` is done.
        dst: The global rank of the destination.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
            arrive in order.
        group_dst: The destination's rank in the group, instead of ``dst``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        A ``Work``, whose ``wait()`` raises the errors of the call; None on a rank outside the
        group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
            usable.
    """
    return resolve_group(group).isend(tensor, dst, tag, group_dst, timeout)


def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> int:
    """Receive a message from one member into ``tensor``.

    Args:
        tensor: A NumPy or CuPy array or a buffer, of any shape; a numeric dtype, bool, or one
            of ml_dtypes' floats. The sender's array has the same size and dtype. A read-only
            array (JAX) raises TypeError: use ``irecv(...).result()``.
        src: The global rank of the source; any member if neither ``src`` nor ``group_src`` is
            given.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
            arrive in order.
        group_src: The source's rank in the group, instead of ``src``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        The sender's global rank; -1 on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
            usable.
        CollectiveMismatchError: If the sent array has a different size or dtype; the message is
            lost and the group stays usable.
        CollectiveTimeoutError: Past the deadline; the group stays usable.
        RankFailedError: If the other end dies or leaves.
    """
    return resolve_group(group).recv(tensor, src, tag, group_src, timeout)


def irecv(
    tensor: A,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Work[A]:
    """Begin to receive a message from one member into ``tensor``.

    Args:
        tensor: A NumPy, JAX or CuPy array or a buffer, of any shape; a numeric dtype, bool, or
            one of ml_dtypes' floats. The sender's array has the same size and dtype. It must
            not be used until the ``Work`` is done.
        src: The global rank of the source; any member if neither ``src`` nor ``group_src`` is
            given.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
            arrive in order.
        group_src: The source's rank in the group, instead of ``src``.
        timeout: The call's deadline: seconds, a timedelta or "30s"; by default the group's.

    Returns:
        A ``Work``. Its ``result()`` is the array, or a new one if ``tensor`` is read-only
        (JAX). Its ``source_rank()`` is the sender, and its ``wait()`` raises the errors of the
        call. None on a rank outside the group.

    Raises:
        TypeError, ValueError: For invalid arguments; nothing was sent, and the group stays
            usable.
    """
    return resolve_group(group).irecv(tensor, src, tag, group_src, timeout)
