"""Where the members of a group are, as they say in the group's store."""

from __future__ import annotations

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.communicators.store_waits import PeerKeys
from transport.place import Place


class Directory(PeerKeys):
    """Says where this rank is, and finds out where others are. Several threads."""

    def __init__(self, membership: Membership, place: Place) -> None:
        super().__init__(membership)
        self.place: Place = place.seen_from(membership.store)
        self._places: dict[int, Place] = {membership.rank: self.place}

    def publish(self) -> None:
        """Tell the other members where this rank is."""
        self._store.post(_place_key(self._membership.rank), self.place.encode())

    def look_up(self, peer: int, call: Call) -> Place:
        """Return where ``peer`` is, waiting until it has said so."""
        place = self._places.get(peer)
        if place is None:
            place = Place.decode(self.read(_place_key(peer), peer, call))
            self._places[peer] = place
        return place

    def look_up_all(self, call: Call) -> list[Place]:
        """Return where all members are, waiting until they have said so: one question for all."""
        members = range(self._membership.size)
        peers = [peer for peer in members if peer not in self._places]
        for peer, data in self.read_all(_place_key, peers, call).items():
            self._places[peer] = Place.decode(data)
        return [self._places[member] for member in members]

    def find(self, peer: int) -> Place | None:
        """Return where ``peer`` is, None if it has not said so yet."""
        if peer not in self._places:
            key = _place_key(peer)
            if not self._store.check([key]):
                return None
            self._places[peer] = Place.decode(self._store.get(key))
        return self._places[peer]

    def is_known(self, peer: int) -> bool:
        """Whether ``peer`` has said where it is."""
        return self.find(peer) is not None

    def is_near(self, peer: int, call: Call) -> bool:
        """Whether memory can be shared with ``peer``, as far as can be told; see ``look_up``."""
        return peer == self._membership.rank or self.place.may_share_with(self.look_up(peer, call))


def _place_key(rank: int) -> str:
    return f"shm/{rank}"
