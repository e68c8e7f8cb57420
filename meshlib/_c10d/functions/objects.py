"""Written by tests/docs/functions.py from meshlib/_collectives/on_objects.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshlib._job.current import Group, resolve_group
from transport._waiting.deadline import Timeout


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> list[Any]:
    """Replace the objects in ``object_list`` with those of one member's list.

    Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
    the job's secret can send a pickle.

    Args:
        object_list: A list, of the same length on every member.
        src: The global rank of the source; by default that of group rank 0.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        device: Accepted for compatibility with c10d.
        group_src: The source's rank in the group, instead of ``src``.
        timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
            of its array calls has the group's deadline.

    Returns:
        ``object_list``; None on a rank outside the group.

    Raises:
        TypeError: For an invalid argument or an object that cannot be pickled, before anything
            is sent.
        ValueError: For an invalid rank, and on a member whose list differs in length from the
            source's.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).broadcast_object_list(object_list, src, device, group_src, timeout)


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group = None, timeout: Timeout | None = None
) -> list[Any]:
    """Put member i's ``obj`` into ``object_list[i]`` on all members.

    Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
    the job's secret can send a pickle.

    Args:
        object_list: A list with ``size()`` entries; the call replaces them.
        obj: An object that can be pickled.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
            of its array calls has the group's deadline.

    Returns:
        ``object_list``; None on a rank outside the group.

    Raises:
        TypeError: For an invalid argument or an object that cannot be pickled, before anything
            is sent.
        ValueError: For a list of the wrong length.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).all_gather_object(object_list, obj, timeout)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    timeout: Timeout | None = None,
) -> list[Any] | None:
    """Put member i's ``obj`` into ``object_gather_list[i]`` of one member.

    Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
    the job's secret can send a pickle.

    Args:
        obj: An object that can be pickled.
        object_gather_list: On the destination, a list with ``size()`` entries, which the call
            replaces; None elsewhere.
        dst: The global rank of the destination; by default that of group rank 0.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        group_dst: The destination's rank in the group, instead of ``dst``.
        timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
            of its array calls has the group's deadline.

    Returns:
        ``object_gather_list`` on the destination, None elsewhere.

    Raises:
        TypeError: For an invalid argument or an object that cannot be pickled, before anything
            is sent.
        ValueError: For an invalid rank, a list of the wrong length, a missing list on the
            destination, or a list elsewhere.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).gather_object(obj, object_gather_list, dst, group_dst, timeout)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    timeout: Timeout | None = None,
) -> Any:
    """Put entry i of one member's list into member i's ``scatter_object_output_list[0]``.

    Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
    the job's secret can send a pickle.

    Args:
        scatter_object_output_list: A list with at least one entry; the call replaces the first.
        scatter_object_input_list: On the source, one object for each member; ignored elsewhere.
        src: The global rank of the source; by default that of group rank 0.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        group_src: The source's rank in the group, instead of ``src``.
        timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
            of its array calls has the group's deadline.

    Returns:
        The object; None on a rank outside the group.

    Raises:
        TypeError: For an invalid argument or an object that cannot be pickled, before anything
            is sent.
        ValueError: For an invalid rank, an empty output list, or no input list on the source.
        CollectiveMismatchError: On every member, if the members' calls differ.
        CollectiveTimeoutError: On every member, past the deadline; names the missing ranks.
        RankFailedError: On every member, if one dies or leaves. These three break the group.
    """
    return resolve_group(group).scatter_object_list(
        scatter_object_output_list, scatter_object_input_list, src, group_src, timeout
    )


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    tag: int = 0,
    timeout: Timeout | None = None,
) -> None:
    """Send the objects in ``object_list`` to one member.

    Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
    the job's secret can send a pickle.

    Args:
        object_list: Objects that can be pickled.
        dst: The global rank of the destination.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        device: Accepted for compatibility with c10d.
        group_dst: The destination's rank in the group, instead of ``dst``.
        tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
            arrive in order.
        timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
            of its array calls has the group's deadline.

    Raises:
        TypeError: For an invalid argument or an object that cannot be pickled, before anything
            is sent.
        ValueError: For an invalid rank or tag.
        CollectiveTimeoutError: Past the deadline; names the other end. It breaks the group.
        RankFailedError: If the other end dies or leaves.
    """
    resolve_group(group).send_object_list(object_list, dst, device, group_dst, tag, timeout)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    tag: int = 0,
    timeout: Timeout | None = None,
) -> int:
    """Replace the objects in ``object_list`` with the objects that one member sends.

    Objects are sent as pickles (protocol 5). Unpickling can run any code; only ranks that know
    the job's secret can send a pickle.

    Args:
        object_list: A list as long as the sender's.
        src: The global rank of the source; any member if neither ``src`` nor ``group_src`` is
            given.
        group: A ProcessGroup or a DeviceMesh; None is the default group.
        device: Accepted for compatibility with c10d.
        group_src: The source's rank in the group, instead of ``src``.
        tag: An integer from 0 to 2**32 - 1, equal at both ends. Messages with the same tag
            arrive in order.
        timeout: The deadline of the whole call: seconds, a timedelta or "30s". By default each
            of its array calls has the group's deadline.

    Returns:
        The sender's global rank; -1 on a rank outside the group.

    Raises:
        TypeError: For an invalid argument.
        ValueError: For an invalid rank or tag, and if the sender's list has a different length;
            the sent objects are lost.
        CollectiveTimeoutError: Past the deadline; the group stays usable.
        RankFailedError: If the other end dies or leaves.
    """
    return resolve_group(group).recv_object_list(object_list, src, device, group_src, tag, timeout)
