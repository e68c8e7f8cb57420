"""``tcp://host:port``: rank 0 serves the store there, or those in a multicast group meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transport.deadline import Deadline
from transport.errors import DistError
from transport.rendezvous.address import RendezvousAddress
from transport.rendezvous.beacon import is_multicast
from transport.rendezvous.multicast import multicast_rendezvous
from transport.rendezvous.static import Secret, static_store
from transport.store.base import DEFAULT_STORE_TIMEOUT, Store


def tcp_rendezvous(
    url: str,
    *,
    timeout: float = DEFAULT_STORE_TIMEOUT,
    group_name: str = "",
    secret: Secret = ...,
    **_: Any,
) -> Iterator[tuple[Store, int, int]]:
    """Yield the store at the URL's host and port, the rank and the world size.

    A multicast address needs no rank: see ``multicast_rendezvous``.
    """
    address = RendezvousAddress.parse(url)
    if not address.host or address.port <= 0:
        raise ValueError(f"init_method must be tcp://host:port, got {url!r}")
    if is_multicast(address.host):
        yield multicast_rendezvous(address, timeout, group_name, secret)
    else:
        address.check_place()
        rank, world_size = address.rank, address.world_size
        deadline = Deadline.after(timeout)
        store = static_store(
            address.host, address.port, rank, world_size, deadline, group_name, secret
        )
        yield store, rank, world_size
    raise DistError(f"{url!r} gives one rendezvous only; expected no second next()")
