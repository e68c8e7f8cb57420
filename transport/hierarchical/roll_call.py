"""How members learn where the others are: through the group's store."""

from __future__ import annotations

from transport.call import Call
from transport.errors import StoreTimeoutError
from transport.hierarchical.hosts import Host, Placement
from transport.runtime import Membership
from transport.store.base import Store
from transport.store_waits import PATIENCE_SECONDS, StoreWaits, has_not_entered

_PLACEMENT = "placement"


class RollCall:
    """Publishes this rank's host at once; ``placement`` waits for all.

    The last member to publish puts the whole together, so that each of the others reads one value,
    not as many as there are members. Any thread may ``cancel``.
    """

    def __init__(self, membership: Membership, host: Host) -> None:
        self._membership = membership
        self._waits = StoreWaits(membership.store)
        store, size = membership.store, membership.size
        store.set(_host_key(membership.rank), host.encode())
        # A group that is made again after all have closed it counts on.
        if store.add("hosts-known", 1) % size == 0:
            found = store.multi_get([_host_key(rank) for rank in range(size)])
            store.set(_PLACEMENT, Placement.of([Host.decode(data) for data in found]).encode())

    def placement(self, call: Call) -> Placement:
        """Return where all members are, waiting until they have said so.

        Raises ``CommunicatorTimeoutError`` past the call's deadline, ``CommunicatorAbortedError``
        after ``cancel``.
        """
        data = self._waits.wait(lambda store: self._read(store, call))
        return Placement.decode(data, self._membership.size)

    def cancel(self, reason: str) -> None:
        """Break off all waits, now and later. Never blocks."""
        self._waits.cancel(reason)

    def _read(self, store: Store, call: Call) -> bytes:
        left = call.deadline.remaining()
        try:
            return store.get(_PLACEMENT, min(left, PATIENCE_SECONDS))
        except StoreTimeoutError:
            missing = self._first_missing(store)
        call.waiting_for = missing
        try:
            data = store.get(_PLACEMENT, call.deadline.remaining())
        except StoreTimeoutError as error:
            missing = self._first_missing(store)
            raise has_not_entered(call, self._membership, missing) from error
        call.waiting_for = None
        return data

    def _first_missing(self, store: Store) -> int | None:
        members = range(self._membership.size)
        return next((rank for rank in members if not store.check([_host_key(rank)])), None)


def _host_key(rank: int) -> str:
    return f"host/{rank}"
