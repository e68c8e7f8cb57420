"""Dividing ranks into groups: c10d's ``new_subgroups`` and related functions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from meshlib._arrays.checks import check_list
from meshlib._c10d.groups import new_group
from meshlib._groups.backend import parse_backend
from meshlib._groups.nccl_splits import split
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import Group, current_world, resolve_process_group
from transport import _environment as environment
from transport._checks import to_whole_number, to_whole_numbers
from transport._waiting.deadline import Timeout


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup]]:
    """Divide ``group`` into groups of ``group_size`` consecutive ranks.

    Returns this rank's group and the list of all groups. ``group_size`` defaults to
    ``LOCAL_WORLD_SIZE``, the number of ranks on this host. All members of ``group`` call.
    ``timeout`` (seconds, a timedelta or "30s") and ``backend`` default to the job's; ``group_desc``
    is each group's name in messages; ``pg_options`` is accepted for compatibility with c10d. Raises
    ValueError unless ``group_size`` divides the group's size, and on a rank outside ``group``.
    """
    parent = _parent(group, "new_subgroups")
    size = len(parent.ranks)
    if group_size is None:
        text = os.environ.get(environment.LOCAL_WORLD_SIZE, "")
        if not text.isdecimal():
            raise ValueError(
                "group_size is None and the environment variable "
                f"{environment.LOCAL_WORLD_SIZE} is {text!r}; expected either"
            )
        group_size = int(text)
    group_size = to_whole_number(group_size, "group_size")
    if group_size < 1 or size % group_size:
        raise ValueError(
            f"group_size is {group_size}; expected a divisor of {size}, the size of {parent}"
        )
    cut = [list(parent.ranks[i : i + group_size]) for i in range(0, size, group_size)]
    own, every = new_subgroups_by_enumeration(cut, timeout, backend, pg_options, group_desc)
    assert own is not None  # this rank is in the parent, and the groups cover it
    return own, every


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: Timeout | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup]]:
    """Create a group for each list of global ranks in ``ranks_per_subgroup_list``.

    Returns this rank's group (or None) and the list of all groups. ``timeout`` (seconds or "30s")
    and ``backend`` default to the job's; ``group_desc`` is each group's name in messages;
    ``pg_options`` is accepted for compatibility with c10d. Raises ValueError for an empty list, a
    rank that does not exist, or a rank in two lists; TypeError for a value that is not a list of
    lists of ranks.
    """
    size = current_world().size
    lists = _disjoint(ranks_per_subgroup_list, "ranks_per_subgroup_list", size)
    every = [
        new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in lists
    ]
    return next((one for one in every if one.rank() >= 0), None), every


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Timeout | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Return a new group of the list in ``split_ranks`` that includes this rank, or None.

    The lists contain group ranks of ``parent_pg``. ``timeout`` and ``backend`` default to the
    parent's; ``backend`` may name some of the parent's devices, with the same backends.
    ``group_desc`` is the group's name in messages; ``pg_options`` is accepted for compatibility
    with c10d. No message is sent, with one exception: if ``init_process_group`` got a
    ``device_id``, all members of the parent must call, and NCCL splits the parent's communicator.
    Raises ValueError for lists that overlap or have ranks outside the parent.
    """
    parent = _parent(parent_pg, "split_group")
    if split_ranks is None:
        raise ValueError("split_ranks is None; expected a list of lists of ranks in the parent")
    lists = _disjoint(split_ranks, "split_ranks", len(parent.ranks), f" in {parent}")
    chosen = parent.backend if backend is None else backend
    strange = parse_backend(chosen).items() - parent.backends.items()
    if strange:
        raise ValueError(f"backend {backend!r} is not among the parent's, {parent.backend!r}")
    own = next((ranks for ranks in lists if parent.rank() in ranks), None)
    child: ProcessGroup | None = None
    if own is not None:
        members = [parent.ranks[rank] for rank in own]
        granted = parent.timeout if timeout is None else timeout
        child = new_group(members, granted, chosen, pg_options, group_desc=group_desc)
    if current_world().cuda_device is not None:
        split(parent, child, lists)
    return child


def _parent(group: Group, function: str) -> ProcessGroup:
    parent = resolve_process_group(group)
    if parent.rank() < 0:
        rank = current_world().rank
        raise ValueError(f"rank {rank} is not in {parent} and cannot call {function}")
    return parent


def _disjoint(
    lists: Sequence[Sequence[int]], name: str, size: int, where: str = ""
) -> list[list[int]]:
    """Return the checked lists: disjoint, not empty, with ranks below ``size``."""
    check_list(lists, name)
    found = [to_whole_numbers(ranks, f"{name}[{i}]") for i, ranks in enumerate(lists)]
    seen: dict[int, int] = {}
    for i, ranks in enumerate(found):
        for rank in ranks:
            if rank in seen:
                raise ValueError(f"{name}: rank {rank} is in list {seen[rank]} and in list {i}")
            seen[rank] = i
        if not ranks or min(ranks) < 0 or max(ranks) >= size:
            raise ValueError(
                f"{name}[{i}] is {ranks}; expected one or more ranks from 0 to {size - 1}{where}"
            )
    return found
