"""The beginning and end of a job: ``init_process_group`` and ``destroy_process_group``."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack, suppress
from typing import Any

from meshlib._groups.backend import is_fake, parse_backend
from meshlib._job.current import (
    current_world,
    find_world,
    install,
    is_thread_world,
    resolve_process_group,
)
from meshlib._job.starting.finding import DEFAULT_INIT_METHOD, find_alone, find_others
from meshlib._job.starting.interrupts import defer_interrupts
from meshlib._job.thread_rank import thread_rank
from meshlib._job.world import DEFAULT_TIMEOUT, World
from meshlib._recording.log import set_debug_level_from_env
from transport import _environment as environment
from transport._errors import CollectiveMismatchError
from transport._rendezvous import ForeignStore
from transport._store.base import Store
from transport._waiting.deadline import Timeout, to_seconds

EXIT_DRAIN_SECONDS = 1.0
FAILED_LINGER_SECONDS = 2.0


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | ForeignStore | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join the job: find the other ranks, and create the default group of all ranks.

    ``init_method`` is a URL: ``env://`` by default, ``tcp://host:port``, ``file:///path``,
    ``solo://`` for a world of one, ``mpi://`` if MPI assigns the ranks (the default of
    ``backend="mpi"``). Alternatively pass a ``store`` with ``rank`` and ``world_size``; waits on
    that store then end with ``RankFailedError`` when a rank is lost. The store may be another
    library's, with ``set``, ``get`` and ``add`` like ``torch.distributed.Store``. Rank 0 then
    publishes in it the address and the secret of the job's own store.

    ``timeout`` (seconds, timedelta, "30s"; by default 30 minutes) bounds this call and is the
    default deadline of all later calls. ``group_name`` separates jobs that share a store.

    With ``backend="fake"`` this process is ``rank`` of ``world_size`` ranks, the other ranks do not
    exist, and calls return at once (docs/run/fake.md). Neither ``init_method`` nor ``store`` is
    allowed; ``rank`` and ``world_size`` default to the environment's RANK and WORLD_SIZE.

    With ``backend="inproc"`` only the calling thread becomes the rank. In
    ``meshlib.testing.run_ranks`` a thread gets its rank from the run, and the run's ``backend`` and
    ``timeout`` are the defaults.

    ``device_id`` (a number, ``"cuda:1"``, or an object with ``id`` or ``index``) binds this rank to
    a GPU, which becomes the calling thread's current one. If NCCL is a backend, it then connects
    all ranks here instead of at the first call. Groups that all ranks create together need no
    further connections. ``pg_options`` is accepted for compatibility with c10d.

    Raises ValueError or TypeError for invalid arguments, and ValueError if there is already a
    default group. Raises LaunchEnvironmentError (a ValueError) for missing environment variables,
    ``DistNetworkError`` if the store cannot be reached, and ``DistStoreError`` with the missing
    ranks if not all ranks arrive in time.
    """
    if environment.DEBUG in os.environ:
        set_debug_level_from_env()
    mine = thread_rank()
    chosen = parse_backend(mine.backend if mine is not None and backend is None else backend)
    if find_world() is not None and not (mine is not None and mine.provided):
        raise ValueError(
            "the default process group is already initialised; call destroy_process_group() first"
        )
    default = DEFAULT_TIMEOUT if mine is None else mine.timeout
    seconds = default if timeout is None else to_seconds(timeout)
    names = set(chosen.values())
    thread_only, alone = names == {"inproc"}, is_fake(chosen)
    with ExitStack() as undo:
        interrupts = defer_interrupts()
        undo.callback(interrupts)
        if alone:
            found = find_alone(init_method, store, rank, world_size, group_name)
        else:
            found = find_others(
                init_method,
                store,
                rank,
                world_size,
                group_name,
                default="mpi://" if "mpi" in names else DEFAULT_INIT_METHOD,
                timeout=seconds,
                networked=not thread_only,
            )
        if mine is not None and mine.world is not None:  # the program creates its own World
            provided = mine.world
            install(None, thread_only=True)
            provided.close(drain=0.0, linger=0.0)
        world = World(
            found.store,
            found.rank,
            found.size,
            runtime=found.runtime,
            backends=chosen,
            timeout=seconds,
            joining=found.rank >= found.size,
            alone=alone,
        ).join()
        if isinstance(store, Store):
            world.listener.add_store(store)
        world.on_close(interrupts)
        install(world, thread_only=thread_only)
        atexit.unregister(_close_at_exit)  # once, however many jobs a process joins
        atexit.register(_close_at_exit)
        if device_id is not None:
            # Imported here, because most jobs need no GPU.
            from meshlib._job.starting.gpu import bind_cuda_device

            undo.callback(destroy_process_group)
            bind_cuda_device(world, device_id)
        undo.pop_all()


def destroy_process_group(group: Any = None) -> None:
    """Leave ``group``, or the job if ``group`` is None or the default group.

    Open calls get a few seconds to end. After leaving the job, ``init_process_group`` may be called
    again. A group without this rank is ignored.

    Ranks that leave the job compare their calls, because the last call may exchange no data that
    reveals a mismatch. If ranks that left before had made different calls, this raises
    ``CollectiveMismatchError`` with the table, after this rank has left. Raises ValueError if there
    is no default group, TypeError if ``group`` is not a group.
    """
    world = current_world()
    if group is not None:
        target = resolve_process_group(group)
        if target is not world.default_group:
            world.registry.forget(target)
            return
    install(None, thread_only=is_thread_world(world))
    world.close()


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return find_world() is not None


def ensure_world() -> World:
    """Return the World; initialise the default process group from the environment if necessary."""
    if find_world() is None:
        init_process_group()
    return current_world()


def _close_at_exit() -> None:
    """Close a World that the program did not close, quickly and silently."""
    world = find_world()
    if world is None:
        return
    install(None, thread_only=False)
    # After an unhandled exception this rank leaves at once, and reports it.
    failed = getattr(sys, "last_value", None)
    if failed is not None:
        world.announce_exit(f"ended with {type(failed).__name__}: {failed}")
        # If this rank serves the store, the other ranks must still read the error there.
        with suppress(CollectiveMismatchError):
            world.close(drain=0.0, linger=FAILED_LINGER_SECONDS)
        return
    try:
        world.close(drain=EXIT_DRAIN_SECONDS)
    except CollectiveMismatchError as error:
        world.log.error("%s", error)  # no caller can catch it
