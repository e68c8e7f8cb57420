"""Creating and querying groups: c10d's ``new_group`` and related functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import Group, current_world, resolve_process_group
from transport._checks import to_whole_number
from transport._waiting.deadline import Timeout


class _WorldGroup:
    """Provides ``group.WORLD``: the caller's default group."""

    @property
    def WORLD(self) -> ProcessGroup:
        """The default group."""
        return current_world().default_group


group: _WorldGroup = _WorldGroup()


class _NonGroupMember:
    """A value that equals every group without this rank."""

    def __eq__(self, other: object) -> bool:
        return other is self or (isinstance(other, ProcessGroup) and other.rank() < 0)

    __hash__: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class GroupMember:
    """Namespace of ``NON_GROUP_MEMBER``, which equals every group without this rank."""

    NON_GROUP_MEMBER = _NonGroupMember()


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup:
    """Return a new group of the global ``ranks`` (all by default), sorted if ``sort_ranks``.

    ``timeout`` (seconds or "30s") and ``backend`` default to the job's; ``group_desc`` is the
    group's name in messages. ``pg_options`` and ``device_id`` are accepted for compatibility with
    c10d.

    Only members have to call, in the same order for the same ranks; ``use_local_synchronization``
    is ignored and always counts as true. On a rank outside the group, ``rank()`` is -1 and calls
    return None. No message is sent.

    Raises ValueError for ranks that do not exist or appear twice and for an unknown backend,
    TypeError for ranks or a timeout of the wrong type.
    """
    return current_world().registry.new_group(
        ranks, backend=backend, timeout=timeout, desc=group_desc or "", sort=sort_ranks
    )


def get_rank(group: Group = None) -> int:
    """Return the caller's rank in ``group``, or -1 if it is not a member."""
    return resolve_process_group(group).rank()


def get_world_size(group: Group = None) -> int:
    """Return the number of members of ``group``, or -1 if the caller is not a member."""
    process_group = resolve_process_group(group)
    return len(process_group.ranks) if process_group.rank() >= 0 else -1


def get_backend(group: Group = None) -> str:
    """Return the name of the backend of ``group`` (of its first device, if it has several)."""
    return resolve_process_group(group).name()


def get_backend_config(group: Group = None) -> str:
    """Return the backends of ``group`` by device: ``cpu:tcp``, or ``cpu:tcp,cuda:nccl``."""
    return resolve_process_group(group).backend


def set_timeout(timeout: Timeout, group: Group = None) -> None:
    """Set the default deadline of the group's calls.

    ``timeout`` is in seconds, a timedelta or "30s". Raises ValueError if it is negative, TypeError
    for other types.
    """
    resolve_process_group(group).set_timeout(timeout)


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return the group rank of ``global_rank`` in ``group``.

    Raises ValueError if it is not a member, TypeError if it is not an integer.
    """
    rank = to_whole_number(global_rank, "global_rank")
    return resolve_process_group(group).group_rank(rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of the member of ``group`` with the rank ``group_rank``.

    Raises ValueError if there is no such member, TypeError if ``group_rank`` is not an integer.
    """
    members = resolve_process_group(group)
    place = to_whole_number(group_rank, "group_rank")
    if not 0 <= place < len(members.ranks):
        raise ValueError(
            f"group_rank is {place}; expected 0 to {len(members.ranks) - 1} in {members}"
        )
    return members.ranks[place]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of the members of ``group``, by group rank."""
    return list(resolve_process_group(group).ranks)
