"""The store of a job whose address, ranks and world size are known: rank 0 serves it."""

from __future__ import annotations

from transport.deadline import Deadline
from transport.rendezvous.request import Request
from transport.rendezvous.seats import in_group, take_seat
from transport.store.base import Store
from transport.store.tcp.store import TCPStore


def static_store(request: Request, host: str, port: int, rank: int, world_size: int) -> Store:
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

    return take_seat(connect, rank, world_size, request.deadline())[0]
