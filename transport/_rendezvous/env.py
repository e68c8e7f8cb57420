"""``env://``: the launcher's variables contain the store's address and this rank's place."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack

from transport import _environment as environment
from transport._launch_environments import (
    KNOWN,
    NONE,
    LaunchEnvironmentError,
    RankPlace,
    detect,
    hints,
)
from transport._net import LOOPBACK
from transport._net.sockets import format_address, is_local
from transport._rendezvous.plain import solo_rendezvous, static_store
from transport._rendezvous.rank_claims import current_job_part, in_group, next_job_part
from transport._rendezvous.request import RendezvousRequest
from transport._store.base import Store
from transport._store.opening import open_store
from transport._store.prefix_store import PrefixStore

ALONE = "solo://"
_LOGGER = logging.getLogger("meshlib.transport")


def env_rendezvous(request: RendezvousRequest) -> tuple[Store, int, int]:
    """Return the store, the rank and the world size that the environment defines.

    Rank and world size in the URL's query take precedence. Raises LaunchEnvironmentError, which
    names the missing and the set variables.
    """
    if os.environ.get(environment.LAUNCHER, "").strip().lower() == NONE:
        return solo_rendezvous(request, f"{environment.LAUNCHER}={NONE}")
    place = detect()
    rank = _pick(request.rank, place.rank)
    world_size = _pick(request.world_size, place.world_size)
    host, port = place.master_addr, place.master_port
    if rank is None or world_size is None or host is None or port is None:
        needed = {
            environment.RANK: rank,
            environment.WORLD_SIZE: world_size,
            environment.MASTER_ADDR: host,
            environment.MASTER_PORT: port,
        }
        raise LaunchEnvironmentError(_explain(needed, place))
    if world_size < 1:
        raise LaunchEnvironmentError(
            f"{environment.WORLD_SIZE} must be at least 1, got {world_size}"
        )
    joining = os.environ.get(environment.JOIN) == "1"
    if joining and rank < world_size:
        raise LaunchEnvironmentError(
            f"{environment.JOIN} is 1 for a rank that joins a running job: expected"
            f" {environment.RANK} >= {environment.WORLD_SIZE} = {world_size}, got {rank}"
        )
    if rank < 0 or (rank >= world_size and not joining):
        raise LaunchEnvironmentError(
            f"{environment.RANK} must be from 0 to {environment.WORLD_SIZE} - 1 ="
            f" {world_size - 1}, got {rank}"
        )
    if not 0 < port < 65536:
        raise LaunchEnvironmentError(
            f"{environment.MASTER_PORT} must be a port from 1 to 65535, got {port}"
        )
    _log(place, rank, world_size, host, port)
    if not os.environ.get(environment.MASTER_ADDR):
        _check_implied(request, host, rank, place.launcher)
    agents, _, url = os.environ.get(environment.AGENT_STORE, "").partition(" ")
    if agents == f"{host}:{port}":
        store = _agent_store(request, host, port, url, rank, joining)
    elif joining:
        raise LaunchEnvironmentError(
            f"{environment.JOIN} is 1, but no launcher serves the store at {host}:{port}: expected"
            " meshrun --replace or --spares"
        )
    else:
        store = static_store(request, host, port, rank, world_size)
    return store, rank, world_size


def _agent_store(
    request: RendezvousRequest, host: str, port: int, url: str, rank: int, joining: bool
) -> Store:
    """Return this job's part of the store that the launcher's agent serves or keeps in etcd.

    The agent's store outlives the ranks, so each restart and each initialisation gets its own part.
    """
    store = open_store(host, port, url, timeout=request.timeout, secret=request.secret)
    with ExitStack() as undo:
        undo.callback(store.close)
        restart = os.environ.get(environment.RESTART_COUNT, "0")
        attempt = in_group(PrefixStore(f"restart{restart}", store), request.group_name)
        part = current_job_part(attempt) if joining else next_job_part(attempt, rank)
        undo.pop_all()
        return part


def _pick(given: int, found: int | None) -> int | None:
    return found if given < 0 else given


def _check_implied(request: RendezvousRequest, host: str, rank: int, launcher: str) -> None:
    """Raise LaunchEnvironmentError if rank 0 is not at the address that the launcher implies, or if
    ranks on several machines have no secret.
    """
    if rank == 0 and not is_local(host):
        raise LaunchEnvironmentError(
            f"{launcher} lists {host} as its first node, but started rank 0 on"
            f" {socket.gethostname()}, which does not have that address. Set"
            f" {environment.MASTER_ADDR} to the address of rank 0 on all ranks"
        )
    if request.secret is None and host != LOOPBACK and not os.environ.get(environment.HOST):
        raise LaunchEnvironmentError(
            f"{launcher} started ranks on several machines, which connect to {host} without a"
            " secret. Run `meshlib secret` once if the machines share a home directory. Otherwise"
            f" export {environment.SECRET}=$(meshlib secret --print) before they start"
        )


def _log(place: RankPlace, rank: int, world_size: int, host: str, port: int) -> None:
    given = os.environ.get(environment.MASTER_ADDR)
    _LOGGER.info(
        "rank %d of %d, according to %s; store at %s, according to %s",
        rank,
        world_size,
        place.launcher if place.rank == rank else "the program",
        format_address(host, port),
        environment.MASTER_ADDR if given else place.launcher,
    )


def _explain(needed: Mapping[str, object], place: RankPlace) -> str:
    missing = [name for name, value in needed.items() if value is None]
    found = [f"{name}={os.environ[name]!r}" for name in needed if os.environ.get(name)]
    launchers = ", ".join(known.name for known in KNOWN)
    hint = hints(os.environ)
    text = (
        f"init_method 'env://' needs {' and '.join(missing)} in the environment;"
        f" found {', '.join(found) or 'none of its variables'}"
        f" and {place.launcher} (recognised: {launchers}){'. ' + hint if hint else ''}"
    )
    if place.rank is not None or place.world_size is not None:
        return text
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if not program.endswith(".py") or program == "__main__.py":
        program = "PROGRAM.py"
    return (
        f"{text}. To start several ranks, run meshrun --nproc-per-node 2 {program}. To run this"
        f" process as a world of one, set {environment.LAUNCHER}={NONE}, or call"
        f" init_process_group(init_method={ALONE!r})"
    )
