"""``file:///path``: the ranks meet in a file, and may have their ranks assigned."""

from __future__ import annotations

from transport.deadline import Deadline
from transport.rendezvous.request import Request
from transport.rendezvous.seats import in_group, take_seat
from transport.store.base import Store
from transport.store.file.store import FileStore


def file_rendezvous(request: Request) -> tuple[Store, int, int]:
    """Return a store in the URL's file, the rank and the world size.

    Without a rank (on all processes, or on none) ranks go in the order of arrival. The last
    process removes the file; what a crashed job left there is thrown away.
    """
    address = request.address
    if address.host not in ("", "localhost") or not address.path.startswith("/"):
        raise ValueError(f"init_method must be file:///absolute/path, got {address.url!r}")
    address.check_place(rank_needed=False)
    world_size = address.world_size

    def connect(deadline: Deadline) -> Store:
        store = FileStore(address.path, world_size, deadline.remaining())
        store.set_timeout(deadline.seconds)
        return in_group(store, request.group_name)

    store, rank = take_seat(connect, address.rank, world_size, request.deadline())
    return store, rank, world_size
