"""``env://``: the launcher's variables say where the store is and which rank this is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from transport import environment
from transport.deadline import Deadline
from transport.errors import DistError
from transport.launch_environments import KNOWN, LaunchEnvironmentError, Place, detect
from transport.rendezvous.address import RendezvousAddress
from transport.rendezvous.seats import in_group, take_turn
from transport.rendezvous.static import Secret, static_store
from transport.store.base import DEFAULT_STORE_TIMEOUT, Store
from transport.store.prefix_store import PrefixStore
from transport.store.tcp_store import TCPStore


def env_rendezvous(
    url: str,
    *,
    timeout: float = DEFAULT_STORE_TIMEOUT,
    group_name: str = "",
    secret: Secret = ...,
    **_: Any,
) -> Iterator[tuple[Store, int, int]]:
    """Yield the store, the rank and the world size that the environment names.

    Rank and world size in the URL's query are stronger. Raises LaunchEnvironmentError naming the
    variables that are missing and what was found.
    """
    address = RendezvousAddress.parse(url)
    place = detect()
    rank = _pick(address.rank, place.rank)
    world_size = _pick(address.world_size, place.world_size)
    host, port = place.master_addr, place.master_port
    missing = [
        name
        for name, value in (
            (environment.RANK, rank),
            (environment.WORLD_SIZE, world_size),
            (environment.MASTER_ADDR, host),
            (environment.MASTER_PORT, port),
        )
        if value is None
    ]
    if rank is None or world_size is None or host is None or port is None:
        raise LaunchEnvironmentError(_explain(missing, place))
    if world_size < 1:
        raise LaunchEnvironmentError(
            f"{environment.WORLD_SIZE} must be at least 1, got {world_size}"
        )
    if not 0 <= rank < world_size:
        raise LaunchEnvironmentError(
            f"{environment.RANK} must be from 0 to {environment.WORLD_SIZE} - 1 ="
            f" {world_size - 1}, got {rank}"
        )
    if not 0 < port < 65536:
        raise LaunchEnvironmentError(
            f"{environment.MASTER_PORT} must be a port from 1 to 65535, got {port}"
        )
    deadline = Deadline.after(timeout)
    if os.environ.get(environment.AGENT_STORE) == f"{host}:{port}":
        store = _agent_store(host, port, rank, deadline, group_name, secret)
    else:
        store = static_store(host, port, rank, world_size, deadline, group_name, secret)
    yield store, rank, world_size
    raise DistError(f"{url!r} gives one rendezvous only; expected no second next()")


def _agent_store(
    host: str, port: int, rank: int, deadline: Deadline, group_name: str, secret: Secret
) -> Store:
    """Return this job's part of the store that the launcher's agent serves.

    The agent's store outlives the ranks: restarts and repeated initialisations get parts of
    their own.
    """
    store = TCPStore(host, port, timeout=deadline.remaining(), secret=secret)
    try:
        store.set_timeout(deadline.seconds)
        restart = os.environ.get(environment.RESTART_COUNT, "0")
        return take_turn(in_group(PrefixStore(f"restart{restart}", store), group_name), rank)
    except BaseException:
        store.close()
        raise


def _pick(given: int, found: int | None) -> int | None:
    return found if given < 0 else given


def _explain(missing: list[str], place: Place) -> str:
    names = (
        environment.RANK,
        environment.WORLD_SIZE,
        environment.MASTER_ADDR,
        environment.MASTER_PORT,
    )
    found = [f"{name}={os.environ[name]!r}" for name in names if os.environ.get(name)]
    launchers = ", ".join(known.name for known in KNOWN)
    return (
        f"init_method 'env://' needs {' and '.join(missing)} in the environment;"
        f" found {', '.join(found) or 'none of its variables'}"
        f" and {place.launcher} (recognised: {launchers})"
    )
