"""``shrink_group``: continuing without some ranks, after a failure or as planned."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.continuing.agreement import Agreement, Proposals
from meshlib._job.continuing.epochs import agree_on_epoch, enter
from meshlib._job.current import Group, current_world, resolve_process_group
from meshlib._job.membership import without
from meshlib._job.world import World
from transport._checks import to_whole_number, to_whole_numbers
from transport._errors import RankFailedError
from transport._waiting.deadline import Timeout, to_seconds

SHRINK_DEFAULT = 0
"""``shrink_flags``: let open calls on the group finish."""
SHRINK_ABORT = 1
"""``shrink_flags``: first abort the group, which ends its open calls."""


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: Group = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
    *,
    timeout: Timeout | None = None,
) -> ProcessGroup:
    """Return a new group of the remaining members of ``group``.

    All remaining members call; those in ``ranks_to_exclude`` must not. The members agree through
    the store. They also exclude every lost, silent or late member, so after a failure
    ``shrink_group([], group)`` suffices. An excluded member gets an error when it calls. If members
    name different ranks, all named ranks are excluded.

    For the default group (``group`` None), the result is the next default group, in the same order.
    ``get_rank()`` and ``get_world_size()`` then count the remaining members, which begin an
    *epoch*. Global ranks do not change, because they identify processes. A group is kept if all its
    members continue, have made the same calls, and have no open call. All other groups end, and a
    mesh of the same ranks creates new ones.

    The new group reuses nothing of ``group``: it has its own connections and memory.

    Args:
        ranks_to_exclude: Group ranks in ``group``, without duplicates; may be empty.
        group: A ProcessGroup, a DeviceMesh, or None for the default group.
        shrink_flags: 0 (c10d's ``SHRINK_DEFAULT``), or 1 (``SHRINK_ABORT``) to end open calls
            first.
        pg_options: Accepted for compatibility with c10d.
        timeout: The time to wait for a slow member: seconds, a timedelta or "30s"; by default the
            group's.

    Returns:
        The new group, with the backends and the deadline of ``group``.

    Raises:
        ValueError: On a rank that is in ``ranks_to_exclude`` or outside the group, and for ranks
            that are not in the group or named twice.
        TypeError: If ``ranks_to_exclude`` are not integers.
        RankFailedError: On a rank that the others have excluded.
        DistStoreError: On a rank that has lost the store: it must not continue.
        CollectiveTimeoutError: If the members did not agree in time.
    """
    del pg_options
    world = current_world()
    parent = resolve_process_group(group)
    places = _check(parent, ranks_to_exclude, shrink_flags)
    excluded = {parent.ranks[place] for place in places}
    seconds = call_queue_of(parent).members.seconds if timeout is None else to_seconds(timeout)
    if shrink_flags & SHRINK_ABORT:
        parent.abort("it shrinks")
    if parent is world.default_group:
        change = agree_on_epoch(world, excluded=excluded, timeout=seconds)
        enter(world, change)
        return world.default_group
    return _shrink_other(world, parent, excluded, seconds)


def _check(parent: ProcessGroup, ranks_to_exclude: Sequence[int], flags: int) -> list[int]:
    size, own = len(parent.ranks), parent.rank()
    if own < 0:
        raise ValueError(f"rank {parent.global_rank} is not in {parent} and cannot shrink it")
    places = to_whole_numbers(ranks_to_exclude, "ranks_to_exclude")
    strange = [place for place in places if not 0 <= place < size]
    if strange:
        raise ValueError(
            f"ranks_to_exclude has {strange}; expected ranks from 0 to {size - 1} in {parent}"
        )
    if len(set(places)) != len(places):
        raise ValueError(f"ranks_to_exclude has a rank twice: {places}")
    if own in places:
        raise ValueError(
            f"ranks_to_exclude {places} includes this rank, {own}; expected only ranks that do"
            " not call"
        )
    if to_whole_number(flags, "shrink_flags") not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(f"shrink_flags is {flags}; expected 0 (default) or 1 (abort)")
    return places


def _shrink_other(
    world: World, parent: ProcessGroup, excluded: Collection[int], seconds: float
) -> ProcessGroup:
    """Shrink a group other than the default one, without a new epoch."""

    def decide(proposals: Proposals, missing: Mapping[int, str]) -> dict[str, Any]:
        del proposals
        return {"members": without(parent.ranks, missing), "missing": dict(missing)}

    name = world.registry.next_name(f"shrink/{parent.id}")
    agreement = Agreement(world.store, world.membership, name, parent.ranks, excluded)
    agreed = agreement.reach(None, decide, seconds)
    if world.rank not in agreed["members"]:
        why = agreed["missing"].get(str(world.rank), "was excluded")
        raise RankFailedError(f"rank {world.rank} is excluded from {parent}: it {why}", world.rank)
    call_queue_of(parent).release()
    return world.registry.agreed_group(name, agreed["members"], parent, parent.group_desc)
