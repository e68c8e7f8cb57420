"""How members learn where the others are: through the group's store, unless it is known."""

from __future__ import annotations

from typing import Protocol

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.communicators.store_waits import PeerKeys
from transport.hierarchical.hosts import Placement
from transport.place import Place

_PLACEMENT = "placement"


class Whereabouts(Protocol):
    """Where all members of a group are. Any thread may ``cancel``."""

    def placement(self, call: Call) -> Placement:
        """Return where all members are; raises as a wait of ``call`` does if that takes one."""
        ...

    def cancel(self, reason: str) -> None:
        """Break off all waits, now and later. Never blocks."""
        ...


class Known:
    """A ``placement`` that all members have already."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def placement(self, call: Call) -> Placement:
        """See ``Whereabouts``."""
        del call
        return self._placement

    def cancel(self, reason: str) -> None:
        """See ``Whereabouts``: nobody waits."""


class RollCall:
    """Publishes where this rank is at once; ``placement`` waits for all.

    The last member to publish puts the whole together, so that each of the others reads one value,
    not as many as there are members.
    """

    def __init__(self, membership: Membership, place: Place) -> None:
        self._membership = membership
        self._keys = PeerKeys(membership)
        store, size = membership.store, membership.size
        store.post(_host_key(membership.rank), place.seen_from(store).encode())
        # A group that is made again after all have closed it counts on.
        if store.add("hosts-known", 1) % size == 0:
            found = store.multi_get([_host_key(rank) for rank in range(size)])
            store.post(_PLACEMENT, Placement.of([Place.decode(data) for data in found]).encode())

    def placement(self, call: Call) -> Placement:
        """Return where all members are, waiting until they have said so.

        Raises ``CommunicatorTimeoutError`` past the call's deadline, ``CommunicatorAbortedError``
        after ``cancel``.
        """
        data = self._keys.read_from_last(_PLACEMENT, _host_key, call)
        return Placement.decode(data, self._membership.size)

    def cancel(self, reason: str) -> None:
        """Break off all waits, now and later. Never blocks."""
        self._keys.cancel(reason)


def _host_key(rank: int) -> str:
    return f"host/{rank}"
