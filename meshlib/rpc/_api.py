"""The public functions of RPC: start, shutdown, calls, workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from meshlib._calls.future import Future
from meshlib._job.current import (
    current_world,
    find_world,
    gradients_kept_by,
    keep_gradients_by,
)
from meshlib._job.starting.init import destroy_process_group, init_process_group
from meshlib._job.world import World
from meshlib.rpc._calling.futures import polled, seconds_of
from meshlib.rpc._carriers import Carrier, Differentiating
from meshlib.rpc._errors import WorkerLostError
from meshlib.rpc._membership.directory import WorkerInfo
from meshlib.rpc._references.rref import RRef, create
from meshlib.rpc._worker import LocalWorker, current_worker, find_worker
from transport._checks import to_whole_number
from transport._communicators.runtime import Membership
from transport._errors import DistStoreError, StoreTimeoutError
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Deadline, Timeout, to_seconds

T = TypeVar("T")
DEFAULT_TIMEOUT = 60.0
"""The default timeout of a call, in seconds."""
DEFAULT_THREADS = 16
_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")
_FLUSH_SECONDS = 2.0
_LOOK_SECONDS = 0.5

Worker = str | int | WorkerInfo
"""The worker to call: its name, its rank, or the ``WorkerInfo`` that ``mesh.worker`` returns."""


@dataclass(eq=False)
class RpcBackendOptions:
    """Options for making and serving calls.

    At most ``num_worker_threads`` calls run on a worker at once, not counting calls that wait for
    their own remote calls. The default timeout of a call is ``rpc_timeout`` (seconds; 0: none).
    Without a process group, the workers find each other by ``init_method``.
    """

    num_worker_threads: int = DEFAULT_THREADS
    rpc_timeout: Timeout = DEFAULT_TIMEOUT
    init_method: str | None = None


def init_rpc(
    name: str,
    backend: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Make this rank a worker called ``name``, and wait until all ranks are workers.

    The workers are the ranks of the job. Without a default process group, this creates one from
    ``rank``, ``world_size`` and the options' ``init_method``, or from the environment, and
    ``shutdown`` ends it. ``rpc_backend_options`` limit the concurrent calls on this worker, and the
    time of a call. ``backend`` is accepted for compatibility with c10d.

    Raises ValueError for an invalid name (expected 1 to 127 letters, digits, ``_``, ``:``, ``-``),
    a name of another worker, or a rank or size other than the group's. Raises RuntimeError if
    RPC is already initialised, ``WorkerLostError`` if a rank dies before it is a worker, and
    ``DistStoreError``, which names the missing ranks, past the job's deadline.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"name must be a str, got {name!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"name is {name!r}; expected 1 to 127 characters: letters, digits, '_', ':', '-'"
        )
    options = rpc_backend_options or RpcBackendOptions()
    limit = to_whole_number(options.num_worker_threads, "num_worker_threads")
    if limit < 1:
        raise ValueError(f"num_worker_threads is {limit}; expected at least 1")
    timeout = to_seconds(options.rpc_timeout, "rpc_timeout")
    made = find_world() is None
    if made:
        size = -1 if world_size is None else world_size
        init_process_group(init_method=options.init_method, rank=rank, world_size=size)
    with ExitStack() as undo:
        if made:
            undo.callback(destroy_process_group)
        world = current_world()
        if world.rpc is not None:
            raise RuntimeError("RPC is already initialised; call rpc.shutdown() first")
        for what, given, is_ in (
            ("rank", rank, world.rank),
            ("world_size", world_size, world.size),
        ):
            if given not in (-1, None, is_):
                raise ValueError(
                    f"{what} is {given}; expected {is_}, as in the default process group"
                )
        _join(world, name, limit, timeout).owns_world = made
        undo.pop_all()


def _join(world: World, name: str, limit: int, timeout: float) -> LocalWorker:
    world.rpc_count += 1
    group = f"rpc/{world.rpc_count}"
    store = PrefixStore(group, world.store)
    members = tuple(range(world.size))
    membership = Membership(group, world.rank, members, store, world.runtime)
    worker = LocalWorker(world, membership, name, limit, timeout)
    world.rpc = worker
    with ExitStack() as undo:
        undo.callback(worker.close)
        worker.meet(_exchange_names(store, name, world))
        if gradients_kept_by() is not None:
            differentiate()
        undo.pop_all()
    return worker


def _exchange_names(store: Store, name: str, world: World) -> list[str]:
    store.set(f"name/{world.rank}", name)
    keys = [f"name/{rank}" for rank in range(world.size)]
    deadline = Deadline.after(world.timeout)
    while True:
        try:
            store.wait(keys, timeout=min(_LOOK_SECONDS, deadline.remaining()))
            break
        except StoreTimeoutError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            for rank, how in world.listener.exits().items():
                if rank in missing:
                    raise WorkerLostError(f"rank {rank} {how} before init_rpc()", rank) from error
            if deadline.expired:
                raise DistStoreError(
                    f"init_rpc() waited {world.timeout:g} s for the ranks {missing[:16]}"
                ) from error
    names = [found.decode() for found in store.multi_get(keys)]
    twice = sorted({found for found in names if names.count(found) > 1})
    if twice:
        ranks = [rank for rank, found in enumerate(names) if found == twice[0]]
        raise ValueError(f"name is {twice[0]!r} on the ranks {ranks}; expected different names")
    return names


def shutdown(graceful: bool = True, timeout: Timeout = 0) -> None:
    """End RPC on this worker, and the process group if ``init_rpc`` created it.

    A graceful shutdown waits until all live workers have called this, and no call or callback runs
    on any of them. Until then calls work. After ``timeout`` (seconds, 0: none) it raises
    ``RpcTimeoutError`` with the missing workers, and RPC continues. Without ``graceful``, running
    calls fail.

    Raises RuntimeError if RPC is not initialised.
    """
    worker = current_worker()
    seconds = to_seconds(timeout)
    if graceful:
        worker.shutdown.run(seconds)
    worker.close(_FLUSH_SECONDS if graceful else 0.0)
    if worker.owns_world:
        destroy_process_group()


def rpc_sync(
    to: Worker,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout | None = None,
) -> T:
    """Call ``func(*args, **kwargs)`` on a worker and return the result.

    ``func`` is sent by its name. Arguments and result are pickled, except the memory of arrays,
    which is not copied if possible: do not change an argument before the call has ended. The
    function runs at most once, in a thread of the worker.

    Args:
        to: The worker's name, its rank, its ``WorkerInfo``, or ``mesh["stage"].worker(1)``
        func: The function to call, importable on the worker under the same name
        args: Its positional arguments
        kwargs: Its keyword arguments
        timeout: Seconds (or ``"30s"``) until the call fails; 0: never; None, -1: ``rpc_timeout``

    Raises the exception of ``func``, with the worker's traceback as its cause, or
    ``RpcTimeoutError``, ``WorkerLostError`` or ``RpcConnectionError``. Raises ValueError and
    TypeError for wrong arguments, and pickling errors.
    """
    request = _request(to, func, args, kwargs, timeout)
    return request[0].caller.call(*request[1:]).wait()


def rpc_async(
    to: Worker,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout | None = None,
) -> Future[T]:
    """Call ``func(*args, **kwargs)`` on a worker and return a future of the result, immediately.

    ``func`` is sent by its name. Arguments and result are pickled, except the memory of arrays,
    which is not copied if possible: do not change an argument before the call has ended. The
    function runs at most once, in a thread of the worker. Callbacks of the future (``then``) run in
    a thread of this worker, and may make calls and wait for them.

    Blocks while more than a megabyte of earlier calls waits for the worker to read it.

    Args:
        to: The worker's name, its rank, its ``WorkerInfo``, or ``mesh["stage"].worker(1)``
        func: The function to call, importable on the worker under the same name
        args: Its positional arguments
        kwargs: Its keyword arguments
        timeout: Seconds (or ``"30s"``) until the call fails; 0: never; None, -1: ``rpc_timeout``

    Returns:
        The future. Its ``wait()`` raises the exception of ``func``, with the worker's traceback as
        its cause, or ``RpcTimeoutError``, ``WorkerLostError`` or ``RpcConnectionError``.

    Raises ValueError and TypeError for wrong arguments, pickling errors, and ``WorkerLostError``
    for a worker that is known to be lost.
    """
    request = _request(to, func, args, kwargs, timeout)
    return polled(request[0].caller.call(*request[1:]))


def remote(
    to: Worker,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout | None = None,
) -> RRef[T]:
    """Call ``func(*args, **kwargs)`` on a worker and return a reference to the result, immediately.

    The result remains on the worker, and lives as long as a reference to it. Using the reference
    raises the call's errors: ``func``'s own, ``RpcTimeoutError``, ``WorkerLostError`` or
    ``RpcConnectionError``. On other workers the last three become ``RRefLostError``.

    Args:
        to: The worker's name, its rank, its ``WorkerInfo``, or ``mesh["stage"].worker(1)``
        func: The function or class to call, importable on the worker under the same name
        args: Its positional arguments
        kwargs: Its keyword arguments
        timeout: Seconds (or ``"30s"``) until the call fails; 0: never; None, -1: ``rpc_timeout``

    Raises ValueError and TypeError for wrong arguments, pickling errors, and ``WorkerLostError``
    for a worker that is known to be lost.
    """
    return create(*_request(to, func, args, kwargs, timeout))


def _request(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: Timeout | None,
) -> tuple[LocalWorker, int, Callable[..., Any], tuple[Any, ...], dict[str, Any], float | None]:
    """Return the calling worker and the checked arguments of its call."""
    worker = current_worker()
    seconds = seconds_of(timeout)
    if not callable(func):
        raise TypeError(f"func must be callable, got {func!r}")
    return worker, worker.directory.find(to), func, tuple(args or ()), dict(kwargs or {}), seconds


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the worker called ``worker_name``, or this worker for None.

    Raises ValueError for an unknown name, and RuntimeError if RPC is not initialised.
    """
    worker = current_worker()
    rank = worker.rank if worker_name is None else worker.directory.find(worker_name)
    return worker.workers[rank]


def get_worker_infos() -> tuple[WorkerInfo, ...]:
    """Return all workers, by rank."""
    return current_worker().workers


def get_rpc_timeout() -> float:
    """Return the default timeout of calls in seconds (0: none)."""
    return current_worker().caller.timeout


def cancelled() -> bool:
    """Return whether the call that this thread serves has no waiting caller any more: its caller is
    lost, the connection broke, or the deadline has passed. False outside remote calls.

    Long-running functions should check this regularly, and return if it is true.
    """
    call = current_worker().execution.current
    return call is not None and call.cancelled is not None


def add_carrier(name: str, carrier: Carrier) -> None:
    """Add the values of ``carrier`` to every call, under ``name``.

    Call this on every worker after ``init_rpc`` and before the first call. Raises ValueError if
    the name exists.
    """
    current_worker().carriers.add(name, carrier)


def pickled_for() -> int | None:
    """Return the rank of the worker for which the calling thread is pickling, or None.

    For a ``__reduce__`` whose result is valid only on that worker.
    """
    worker = find_worker()
    return None if worker is None else worker.references.pickled_for


def differentiate_by(make: Callable[[], Differentiating]) -> None:
    """Set ``make``, which creates the carrier of gradients of each worker of this process. The
    package that implements the carrier calls this when it is imported.
    """
    keep_gradients_by(make)
    if find_worker() is not None:
        differentiate()


def differentiate() -> Differentiating:
    """Return this worker's carrier of gradients, created by the function of ``differentiate_by``
    (set by ``parallel.rpc``).

    Raises RuntimeError if RPC is not initialised, or there is no such function.
    """
    worker, make = current_worker(), gradients_kept_by()
    if make is None:
        raise RuntimeError("gradients of remote calls need parallel.rpc: import it")
    found = worker.carriers.differentiate(make)
    for rank in list(worker.directory.lost):
        found.lose(rank)
    return found
