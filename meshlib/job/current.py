"""The World of whoever asks: the calling thread's own, else the process's."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshlib.collectives.collectives import Collectives
from meshlib.groups.process_group import ProcessGroup
from meshlib.job.thread_rank import thread_rank

if TYPE_CHECKING:
    from meshlib.job.world import World

Group = Collectives | None
"""A ProcessGroup, a DeviceMesh, or None for the default group."""


class _OfThread(threading.local):
    """The World of a thread that has one of its own."""

    world: World | None = None


class _Current:
    """The one state that is global."""

    def __init__(self) -> None:
        self.process: World | None = None
        self.thread = _OfThread()


_current = _Current()


def find_world() -> World | None:
    """Return this thread's World, else (unless it is a rank itself) the process's, else None."""
    return _current.thread.world or (_current.process if thread_rank() is None else None)


def current_world() -> World:
    """Return the World; raise ValueError when there is none."""
    world = find_world()
    if world is None:
        raise ValueError(
            "the default process group is not initialised; call init_process_group() first"
        )
    return world


def install(world: World | None, *, thread_only: bool) -> None:
    """Make ``world`` (None: no world) the current one, of this thread or of the process.

    In a thread that is a rank of ``run_ranks`` it is always the thread's.
    """
    mine = thread_rank()
    if mine is not None:
        mine.world, mine.provided = world, False
    if thread_only or mine is not None:
        _current.thread.world = world
    else:
        _current.process = world


def is_thread_world(world: World) -> bool:
    """Return whether ``world`` belongs to this thread alone."""
    return _current.thread.world is world


def adopt_thread(world: World) -> None:
    """Have the calling thread find ``world``, where ranks are threads."""
    if find_world() is not world:
        install(world, thread_only=True)


@contextmanager
def adopted_thread(world: World) -> Generator[None]:
    """Have the calling thread find ``world``, for a while."""
    thread = _current.thread
    before = thread.world
    if find_world() is not world:
        thread.world = world
    try:
        yield
    finally:
        thread.world = before


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
    """Return the process group of ``group``: of a mesh, that over all its dims.

    Raises TypeError as ``resolve_group``.
    """
    found = resolve_group(group).process_group
    assert isinstance(found, ProcessGroup)
    return found
