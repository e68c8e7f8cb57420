"""``tcp://host:port``, ``file:///path`` and ``solo://``, whose URLs contain the store's place."""

from __future__ import annotations

import ipaddress
import logging

from transport._rendezvous.rank_claims import claim_rank, in_group
from transport._rendezvous.request import RendezvousRequest
from transport._store.base import Store
from transport._store.file.store import FileStore
from transport._store.hash_store import HashStore
from transport._store.tcp.store import TCPStore
from transport._waiting.deadline import Deadline

_LOGGER = logging.getLogger("meshlib.transport")


def tcp_rendezvous(request: RendezvousRequest) -> tuple[Store, int, int]:
    """Return the store at the URL's host and port, the rank and the world size.

    A multicast address needs no rank; see ``multicast_rendezvous``. Raises ValueError for an
    incomplete URL.
    """
    host, port = request.host, request.port
    if not host or port <= 0:
        raise ValueError(f"init_method must be tcp://host:port, got {request.url!r}")
    if is_multicast(host):
        # Imported only here, because few jobs use multicast.
        from transport._rendezvous.multicast import multicast_rendezvous

        return multicast_rendezvous(request)
    request.check_place()
    rank, world_size = request.rank, request.world_size
    return static_store(request, host, port, rank, world_size), rank, world_size


def is_multicast(host: str) -> bool:
    """Return whether ``host`` is the address of a multicast group."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_multicast
    except ValueError:
        return False


def static_store(
    request: RendezvousRequest, host: str, port: int, rank: int, world_size: int
) -> Store:
    """Return the store at ``host:port``, which rank 0 serves, once this rank has joined.

    Several jobs of one process may share the port under different group names.
    """

    def connect(deadline: Deadline) -> Store:
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=deadline.remaining(),
            wait_for_workers=False,
            multi_tenant=True,
            secret=request.secret,
        )
        store.set_timeout(deadline.seconds)
        return in_group(store, request.group_name)

    return claim_rank(connect, rank, world_size, request.deadline())[0]


def file_rendezvous(request: RendezvousRequest) -> tuple[Store, int, int]:
    """Return a store in the URL's file, the rank and the world size.

    If no process passes a rank, ranks are assigned in the order of arrival. The last process
    removes the file. Data that a crashed job left in the file is discarded.
    """
    if request.host not in ("", "localhost") or not request.path.startswith("/"):
        raise ValueError(f"init_method must be file:///absolute/path, got {request.url!r}")
    request.check_place(rank_needed=False)
    world_size = request.world_size

    def connect(deadline: Deadline) -> Store:
        store = FileStore(request.path, world_size, deadline.remaining())
        store.set_timeout(deadline.seconds)
        return in_group(store, request.group_name)

    store, rank = claim_rank(connect, request.rank, world_size, request.deadline())
    return store, rank, world_size


def solo_rendezvous(request: RendezvousRequest, why: str | None = None) -> tuple[Store, int, int]:
    """Return a store in this process, rank 0 and world size 1; log ``why``.

    For debuggers, notebooks and tests of a single process. Logs a warning, because a forgotten
    launcher on a cluster has the same effect. Raises ValueError for another rank or world size in
    the URL.
    """
    why = why or repr(request.url)
    request.check_found(0, 1, f"{why} makes a world of one")
    _LOGGER.warning("a world of one, requested by %s: no other process takes part", why)
    return HashStore(), 0, 1
