"""Beginning and ending: ``init_process_group`` and ``destroy_process_group``."""

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
    """Join the job: find the other ranks, and make the default group of all of them.

    ``init_method`` is a URL: ``env://`` by default, ``tcp://host:port``, ``file:///path``,
    ``solo://`` for a world of one, ``mpi://`` where MPI knows the ranks (the default of
    ``backend="mpi"``). In its place an explicit ``store`` may be given, with ``rank`` and
    ``world_size``; waits on that store then end with ``RankFailedError`` when a rank is lost. The
    store may be another library's, with ``set``, ``get`` and ``add`` as ``torch.distributed.Store``
    has them. Rank 0 then publishes in it the address and the secret of the job's own store.

    ``timeout`` (seconds, timedelta, "30s"; by default 30 minutes) bounds this call and is the
    default deadline of all others. ``group_name`` keeps jobs apart that share a store.

    With ``backend="fake"`` this process is ``rank`` of ``world_size`` ranks, the others do not
    exist, and calls return at once (docs/run/fake.md). It takes neither ``init_method`` nor
    ``store``; in place of an argument, the environment's RANK or WORLD_SIZE counts.

    With ``backend="inproc"`` the calling thread alone becomes the rank. In
    ``meshlib.testing.run_ranks`` a thread has its rank from the run, as a process has it from a
    launcher, and the run's ``backend`` and ``timeout`` are the defaults.

    ``device_id`` (a number, ``"cuda:1"``, or an object with ``id`` or ``index``) binds this rank to
    a GPU: it becomes the calling thread's current one. NCCL, if it is a backend, then connects all
    ranks here instead of at the first call. Groups that all ranks make together need no connections
    of their own. ``pg_options`` is accepted for compatibility with c10d.

    Raises ValueError and TypeError for wrong arguments, and ValueError when there is a default
    group already. Raises LaunchEnvironmentError (a ValueError) for missing environment variables,
    ``DistNetworkError`` when the store cannot be reached, and ``DistStoreError`` with the missing
    ranks when not all ranks come in time.
    """
    if environment.DEBUG in os.environ:
        set_debug_level_from_env()
    mine = thread_rank()
    chosen = parse_backend(mine.backend if mine is not None and backend is None else backend)
    if find_world() is not None and not (mine is not None and mine.provided):
        raise ValueError(
            "the default process group is initialised already; call destroy_process_group() first"
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
        if (
            mine is not None and mine.world is not None
        ):  # the program makes its own, as in a process
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
            # Without a device_id no GPU is needed.
            from meshlib._job.starting.gpu import bind_cuda_device

            undo.callback(destroy_process_group)
            bind_cuda_device(world, device_id)
        undo.pop_all()


def destroy_process_group(group: Any = None) -> None:
    """Leave ``group``, or everything when it is None or the default group.

    Calls under way get a few seconds to end. Afterwards ``init_process_group`` may be called
    again. A group of which this rank is not a member is ignored.

    Ranks that leave everything compare their calls, because the last call of a job may exchange
    nothing that shows a mismatch. If ranks that left before had made other calls, this raises
    ``CollectiveMismatchError`` with the table, after everything has ended. Raises ValueError when
    there is no default group, TypeError unless ``group`` is one.
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
    """Return the World; initialise the default process group from the environment if need be."""
    if find_world() is None:
        init_process_group()
    return current_world()


def _close_at_exit() -> None:
    """End a World that its program did not end, quickly and silently."""
    world = find_world()
    if world is None:
        return
    install(None, thread_only=False)
    # After an unhandled exception this rank leaves at once, and reports it.
    failed = getattr(sys, "last_value", None)
    if failed is not None:
        world.announce_exit(f"ended with {type(failed).__name__}: {failed}")
        # If this rank serves the store, the others still have to read the error there.
        with suppress(CollectiveMismatchError):
            world.close(drain=0.0, linger=FAILED_LINGER_SECONDS)
        return
    try:
        world.close(drain=EXIT_DRAIN_SECONDS)
    except CollectiveMismatchError as error:
        world.log.error("%s", error)  # no caller is left to catch it
