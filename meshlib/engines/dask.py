# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportAttributeAccessIssue=false
# (the checks do not install the engine)
"""meshlib under Dask: ``run`` runs a function on a cluster's workers as ranks.

The client serves the job's store. This module restarts nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client, as_completed, wait

from meshlib._launcher.ranks.failure import RaisedError, first_failure
from meshlib.engines._variables import AttemptStore, rank_variables
from transport._net import LOOPBACK
from transport._net.sockets import local_address_towards

_ECHO_SECONDS = 2.0


def run(
    client: Client,
    fn: Callable[..., Any],
    *args: Any,
    mesh: str | None = None,
    workers: Sequence[str] | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
    host: str | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on all workers as the ranks of one job; return the results by rank.

    Args:
        client: The client of the cluster. Its workers must be processes with one thread each,
            because a rank is a process.
        fn: The function. The default process group exists while it runs.
        args: Its arguments, pickled.
        mesh: The mesh of ``init_device_mesh()`` without arguments, such as ``dp=2,tp=2``.
        workers: The addresses of the workers to use; default: all. Ranks are ordered by machine,
            then by address.
        backend: The backend of ``init_process_group``.
        timeout: The deadline of the rendezvous and of calls, in seconds.
        host: The address at which workers reach this process; default: its address towards the
            scheduler.

    Raises the exception of the rank that failed first (``KilledWorker`` if its worker died), and
    cancels the other ranks' tasks. Raises ValueError if a worker is unknown or has several
    threads, and if the cluster has no workers.
    """
    information = client.scheduler_info(n_workers=-1)["workers"]
    chosen = _choose(information, workers)
    if mesh is not None:
        from meshlib._mesh.config import MeshConfig

        MeshConfig.from_string(mesh).resolve(len(chosen))
    hosts = [information[worker]["host"] for worker in chosen]
    name = f"dask-{secrets.token_hex(4)}"
    attempt = AttemptStore(host or _address_of_client(client), name, mesh)
    futures: list[Any] = []
    try:
        for rank, worker in enumerate(chosen):
            variables = attempt.job.variables(rank, hosts, hosts[rank])
            futures.append(
                client.submit(
                    _rank,
                    variables,
                    backend,
                    timeout,
                    fn,
                    args,
                    key=f"{name}-{rank}",
                    workers=[worker],
                    allow_other_workers=False,
                    retries=0,
                    pure=False,
                )
            )
        for future in as_completed(futures):
            if future.status != "finished":
                raise _cause(futures)
        return client.gather(futures)
    finally:
        client.cancel(futures, force=True)
        attempt.close()


def _choose(information: dict[str, Any], workers: Sequence[str] | None) -> list[str]:
    unknown = sorted(set(workers or ()) - set(information))
    if unknown:
        raise ValueError(f"workers {unknown} are not in the cluster: it has {sorted(information)}")
    chosen = sorted(workers or information, key=lambda name: (information[name]["host"], name))
    if not chosen:
        raise ValueError("the cluster has no workers; expected at least one")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"workers must be different, got {chosen}")
    several = [name for name in chosen if information[name]["nthreads"] != 1]
    if several:
        raise ValueError(
            f"workers {several} have several threads, and a rank is a process; expected"
            " threads_per_worker=1 (dask worker --nthreads 1)"
        )
    return chosen


def _address_of_client(client: Client) -> str:
    host, _, port = client.scheduler_info()["address"].rpartition("://")[2].rpartition(":")
    host = host.strip("[]")
    return LOOPBACK if host == LOOPBACK else local_address_towards(host, int(port))


def _cause(futures: list[Any]) -> BaseException:
    """Return the error that caused the others; it may arrive a moment after them."""
    with contextlib.suppress(TimeoutError):
        wait(futures, timeout=_ECHO_SECONDS)
    errors = [
        RaisedError(rank, future.exception(), 0.0)  # no time, because workers' clocks differ
        for rank, future in enumerate(futures)
        if future.status == "error"
    ]
    first = first_failure(errors)
    if first is None:
        raise RuntimeError("the cluster has cancelled the tasks of a running job")
    return first.error


def _rank(
    variables: dict[str, str],
    backend: str | None,
    timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    import meshlib

    with rank_variables(variables):
        meshlib.init_process_group(backend, timeout=timeout)
        try:
            return fn(*args)
        finally:
            meshlib.destroy_process_group()
