"""The current World: that of the calling thread, otherwise that of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshlib._collectives.collectives import Collectives
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.thread_rank import thread_rank
from meshlib._job.world import Current, World, current

Group = Collectives | None
"""A ProcessGroup, a DeviceMesh, or None for the default group."""


def keep_gradients_by(make: Callable[[], Any]) -> None:
    """Let ``make()`` create each worker's storage for gradients of remote calls."""
    Current.gradients = (make,)


def gradients_kept_by() -> Callable[[], Any] | None:
    """Return the function given to ``keep_gradients_by`` last, or None."""
    return Current.gradients[0] if Current.gradients else None


def find_world() -> World | None:
    """Return this thread's World, else (unless the thread is a rank) the process's, or None."""
    if not Current.in_threads:
        return Current.process
    return current.thread or (Current.process if thread_rank() is None else None)


def current_world() -> World:
    """Return the World. Raises ValueError if there is none."""
    world = find_world()
    if world is None:
        raise ValueError(
            "the default process group is not initialised; call init_process_group() first"
        )
    return world


def world_of(group: ProcessGroup) -> World:
    """Return the World that created ``group``."""
    context = call_queue_of(group).context
    assert isinstance(context, World)
    return context


def derived_group(group: ProcessGroup, purpose: str, desc: str = "") -> ProcessGroup:
    """Return the group of the same ranks for calls of ``purpose``, which have a separate order.

    There is one derived group for each purpose, with the backends and the deadline of ``group``. It
    is closed and aborted with ``group``, but fails separately. Its creation sends no message.
    ``desc`` is its name in messages. Raises ValueError after ``group`` was destroyed, and on a rank
    that is not a member.
    """
    return world_of(group).registry.derived_group(group, purpose, desc)


def install(world: World | None, *, thread_only: bool) -> None:
    """Make ``world`` (None: no World) the current one of the process.

    With ``thread_only``, or in a thread that is a rank of ``run_ranks``, only of this thread.
    """
    mine = thread_rank()
    if mine is not None:
        mine.world, mine.provided = world, False
    if thread_only or mine is not None:
        Current.in_threads, current.thread = True, world
    else:
        Current.process = world


def is_thread_world(world: World) -> bool:
    """Return whether ``world`` belongs to this thread alone."""
    return current.thread is world


def resolve_group(group: Group) -> Collectives:
    """Return ``group``, or the default group for None. Raises TypeError for anything else."""
    if group is None:
        return current_world().default_group
    if not isinstance(group, Collectives):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}"
        )
    return group


def resolve_process_group(group: Group) -> ProcessGroup:
    """Return the process group of ``group``; for a mesh, the group of all its dims.

    Raises TypeError like ``resolve_group``.
    """
    found = resolve_group(group).process_group
    assert isinstance(found, ProcessGroup)
    return found
