"""``tcp://host:port``: rank 0 serves the store there, or those in a multicast group meet."""

from __future__ import annotations

from transport.rendezvous.beacon import is_multicast
from transport.rendezvous.multicast import multicast_rendezvous
from transport.rendezvous.request import Request
from transport.rendezvous.static import static_store
from transport.store.base import Store


def tcp_rendezvous(request: Request) -> tuple[Store, int, int]:
    """Return the store at the URL's host and port, the rank and the world size.

    A multicast address needs no rank: see ``multicast_rendezvous``.
    """
    address = request.address
    if not address.host or address.port <= 0:
        raise ValueError(f"init_method must be tcp://host:port, got {address.url!r}")
    if is_multicast(address.host):
        return multicast_rendezvous(request)
    address.check_place()
    rank, world_size = address.rank, address.world_size
    return static_store(request, address.host, address.port, rank, world_size), rank, world_size
