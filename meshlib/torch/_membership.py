"""The World of PyTorch's process groups, created and closed with the first of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import current_world, find_world
from meshlib._job.starting.init import destroy_process_group, init_process_group
from meshlib._job.world import World
from meshlib.torch._store import claim_world


class JoinedGroup(NamedTuple):
    """meshlib's group for a group of PyTorch, its World, and whether that was created for it."""

    group: ProcessGroup
    world: World
    made_world: bool


def join(
    store: Any, rank: int, ranks: Sequence[int], size: int, timeout: timedelta, desc: str
) -> JoinedGroup:
    """Return a new group of ``ranks`` of ``size``, in which this process is ``rank``.

    If the program has initialised meshlib, its World is used. Otherwise all ranks join through
    torch's ``store``, unless they have done so by ``meshlib://``. Raises ValueError if the ranks of
    PyTorch and meshlib differ.
    """
    mine = ranks[rank]
    world = find_world()
    made_world = world is None or claim_world(store)
    if world is None:
        if len(ranks) != size:
            raise ValueError(
                f"the first group of backend 'meshlib' has the ranks {list(ranks)} of {size};"
                " expected the default group, or another one of all ranks"
            )
        init_process_group(store=store, rank=mine, world_size=size, timeout=timeout)
        world = current_world()
    if (world.rank, world.size) != (mine, size):
        raise ValueError(
            f"this process is rank {mine} of {size} for torch.distributed, but rank {world.rank} of"
            f" {world.size} for meshlib; expected the same"
        )
    return JoinedGroup(
        world.registry.new_group(ranks, timeout=timeout, desc=desc, sort=False), world, made_world
    )


def leave(joined: JoinedGroup) -> None:
    """Close the group, and the World if that was created for it. Idempotent."""
    world = find_world()
    if world is not None and world is joined.world:
        destroy_process_group(None if joined.made_world else joined.group)
