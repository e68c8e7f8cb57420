"""Where the members of a group are, as they say in the group's store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.communicators.store_waits import PeerKeys
from transport.place import Place


class Directory:
    """Says where this rank is, and finds out where others are. Several threads; any may ``cancel``.

    All waits raise ``CommunicatorTimeoutError`` past the call's deadline, and
    ``CommunicatorAbortedError`` after ``cancel``.
    """

    def __init__(self, membership: Membership, place: Place) -> None:
        self.place = place = place.seen_from(membership.store)
        self._membership = membership
        self._places: dict[int, Place] = {membership.rank: place}
        self._keys = PeerKeys(membership)

    def publish(self) -> None:
        """Tell the other members where this rank is."""
        self._membership.store.post(_place_key(self._membership.rank), self.place.encode())

    def look_up(self, peer: int, call: Call) -> Place:
        """Return where ``peer`` is, waiting until it has said so."""
        place = self._places.get(peer)
        if place is None:
            place = Place.decode(self._keys.read(_place_key(peer), peer, call))
            self._places[peer] = place
        return place

    def look_up_all(self, call: Call) -> list[Place]:
        """Return where all members are, waiting until they have said so: one question for all."""
        members = range(self._membership.size)
        peers = [peer for peer in members if peer not in self._places]
        for peer, data in self._keys.read_all(_place_key, peers, call).items():
            self._places[peer] = Place.decode(data)
        return [self._places[member] for member in members]

    def find(self, peer: int) -> Place | None:
        """Return where ``peer`` is, None if it has not said so yet."""
        if peer not in self._places:
            store, key = self._membership.store, _place_key(peer)
            if not store.check([key]):
                return None
            self._places[peer] = Place.decode(store.get(key))
        return self._places[peer]

    def is_known(self, peer: int) -> bool:
        """Whether ``peer`` has said where it is."""
        return self.find(peer) is not None

    def is_near(self, peer: int, call: Call) -> bool:
        """Whether memory can be shared with ``peer``, as far as can be told; see ``look_up``."""
        return peer == self._membership.rank or self.place.may_share_with(self.look_up(peer, call))

    def read_all(
        self, key_of: Callable[[int], str], peers: Sequence[int], call: Call
    ) -> dict[int, bytes]:
        """Return what each of ``peers`` writes under its key, waiting for all of it."""
        return self._keys.read_all(key_of, peers, call)

    def check(self) -> None:
        """Raise ``CommunicatorAbortedError`` after ``cancel``."""
        self._keys.check()

    def cancel(self, reason: str) -> None:
        """Break off all waits, now and later. Never blocks; idempotent."""
        self._keys.cancel(reason)


def _place_key(rank: int) -> str:
    return f"shm/{rank}"
