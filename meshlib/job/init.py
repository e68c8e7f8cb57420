"""Beginning and ending: ``init_process_group`` and ``destroy_process_group``."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Any

from meshlib.groups.backend import parse_backend
from meshlib.job.current import (
    current_world,
    find_world,
    install,
    is_thread_world,
    resolve_process_group,
)
from meshlib.job.thread_rank import thread_rank
from meshlib.job.world import DEFAULT_TIMEOUT, World
from meshlib.recording.log import set_debug_level_from_env
from transport import environment
from transport.checks import to_whole_number
from transport.choosing.tuning import agree, from_environment
from transport.communicators.runtime import Runtime
from transport.deadline import Timeout, to_seconds
from transport.errors import CollectiveMismatchError
from transport.net.secret_file import secret_from_environment
from transport.net.tls_choice import tls_from_environment
from transport.rendezvous import ForeignStore, foreign_rendezvous, rendezvous
from transport.rendezvous.seats import in_group, take_turn
from transport.store.base import Store

DEFAULT_INIT_METHOD = "env://"
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

    ``init_method`` is a URL (``env://`` by default, ``tcp://host:port``, ``file:///path``,
    ``solo://`` for a world of one;
    ``mpi://``, where MPI knows the ranks, is the default of ``backend="mpi"``);
    instead of it, an explicit ``store`` with ``rank`` and ``world_size``, on which waits then end
    with ``RankFailedError`` when a rank is lost. It may be another library's, with ``set``, ``get``
    and ``add`` as ``torch.distributed.Store`` has them: there the ranks learn where rank 0 serves
    the job's own, at a port that the kernel chose, and its secret. ``timeout`` (seconds, timedelta,
    "30s"; by default 30 minutes) bounds this call and is the default deadline of all others.
    ``group_name`` keeps jobs apart that share a store. With ``backend="inproc"`` the calling
    thread alone becomes the rank. In ``meshlib.testing.run_ranks`` the thread is told its rank as a
    process is by a launcher, and ``backend`` and ``timeout`` are by default those of the run.
    ``device_id`` (a number, ``"cuda:1"``, or an object with ``id``
    or ``index``) binds this rank to a GPU: it becomes the calling thread's current one, and NCCL,
    if it is a backend, connects all ranks here, not at the first call; groups that all ranks make
    together then need no connections of their own.

    ``pg_options`` is accepted for c10d's sake. Raises ValueError and TypeError for arguments that
    do not fit, ValueError when there is a default group already, LaunchEnvironmentError (a
    ValueError) for what is missing in the environment, ``DistNetworkError`` when the store cannot
    be reached, ``DistStoreError`` that names who is missing when not all ranks come in time.
    """
    if environment.DEBUG in os.environ:
        set_debug_level_from_env()
    mine = thread_rank()
    chosen = parse_backend(mine.backend if mine is not None and backend is None else backend)
    tuning = from_environment()
    thread_only = set(chosen.values()) == {"inproc"}
    if find_world() is not None and not (mine is not None and mine.provided):
        raise ValueError(
            "the default process group is initialised already; call destroy_process_group() first"
        )
    default = DEFAULT_TIMEOUT if mine is None else mine.timeout
    seconds = default if timeout is None else to_seconds(timeout)
    if not isinstance(group_name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"group_name must be a str, got {group_name!r}")
    if init_method is not None and not isinstance(init_method, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"init_method must be a URL such as 'env://', got {init_method!r}")
    rank = to_whole_number(rank, "rank")
    world_size = to_whole_number(world_size, "world_size")
    tls = secret = None
    if not thread_only:
        tls, secret = tls_from_environment(), secret_from_environment()
    users_store = store if isinstance(store, Store) else None
    if mine is not None and mine.world is not None:  # the program makes its own, as in a process
        provided = mine.world
        install(None, thread_only=True)
        provided.close(drain=0.0, linger=0.0)
    if store is None:
        url = init_method or ("mpi://" if "mpi" in chosen.values() else DEFAULT_INIT_METHOD)
        store, rank, world_size = _rendezvous(url, rank, world_size, seconds, group_name)
    else:
        _check_given(store, init_method, rank, world_size)
        if isinstance(store, Store):
            # The user keeps it, and may use it again: this is the job's part of it.
            store = take_turn(in_group(store.clone(), group_name), rank)
        else:
            store, secret = foreign_rendezvous(
                store, rank, world_size, timeout=seconds, group_name=group_name
            )
    try:
        agree(tuning, store, rank)
    except BaseException:
        store.close()
        raise
    runtime = Runtime(
        secret,
        os.environ.get(environment.HOST),
        tls,
        tuning=tuning,
    )
    world = World(
        store,
        rank,
        world_size,
        runtime=runtime,
        backends=chosen,
        timeout=seconds,
        joining=rank >= world_size,
    )
    if users_store is not None:
        world.hearing.tell_store(users_store)
    install(world, thread_only=thread_only)
    if device_id is not None:
        try:
            # No GPU is needed where nobody names one.
            from meshlib.job.gpu import bind_cuda_device

            bind_cuda_device(world, device_id)
        except BaseException:
            destroy_process_group()
            raise


def _check_given(store: Any, init_method: str | None, rank: int, world_size: int) -> None:
    if init_method is not None:
        raise ValueError(f"init_method={init_method!r} and store were both given; expected one")
    if not isinstance(store, (Store, ForeignStore)):
        raise TypeError(
            "store must be a Store, or another library's with set, get and add; got"
            f" {type(store).__name__}: {store!r}"
        )
    if world_size <= 0 or not 0 <= rank < world_size:
        raise ValueError(
            "an explicit store needs rank and world_size with 0 <= rank < world_size, got "
            f"rank={rank}, world_size={world_size}"
        )


def _rendezvous(
    url: str, rank: int, world_size: int, timeout: float, group_name: str
) -> tuple[Store, int, int]:
    mine = thread_rank()
    if mine is not None and url == DEFAULT_INIT_METHOD:
        return mine.join(rank, world_size)
    found = rendezvous(url, rank, world_size, timeout=timeout, group_name=group_name)
    store, rank, world_size = next(iter(found))
    store.set_timeout(timeout)
    return store, rank, world_size


def destroy_process_group(group: Any = None) -> None:
    """Leave ``group``, or everything when it is None or the default group.

    Calls that were issued before get a few seconds to end. Afterwards ``init_process_group`` may
    be called again. A group of which this rank is no member is ignored.

    Ranks that leave everything compare their calls: if those who left before had made others (the
    last one of a job may have exchanged nothing that tells), it raises ``CollectiveMismatchError``
    with the table, after everything has ended. Raises ValueError when there is no default group,
    TypeError for what is no group.
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
    # After an unhandled exception nobody waits for this rank: it goes, and says so.
    failed = getattr(sys, "last_value", None)
    if failed is not None:
        world.announce_exit(f"ended with {type(failed).__name__}: {failed}")
        # The store may be this rank's, and the others still have to read in it what went wrong.
        with suppress(CollectiveMismatchError):
            world.close(drain=0.0, linger=FAILED_LINGER_SECONDS)
        return
    try:
        world.close(drain=EXIT_DRAIN_SECONDS)
    except CollectiveMismatchError as error:
        world.log.error("%s", error)  # nobody is there any more who could catch it


atexit.register(_close_at_exit)
