"""Where the members of a group are, as they say in the group's store, and what memory they give."""

from __future__ import annotations

from transport._call import Call
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys
from transport._errors import CommunicatorTimeoutError, DistNetworkError
from transport._place import Place
from transport._shm.meeting.endpoint import Endpoint
from transport._shm.segment import Segment, adopt


class Directory(PeerKeys):
    """Says where this rank is, and finds out where others are. Several threads."""

    def __init__(self, membership: Membership, place: Place) -> None:
        super().__init__(membership)
        self.place: Place = place
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

    def is_near(self, peer: int, call: Call) -> bool:
        """Whether memory can be shared with ``peer``, as far as can be told; see ``look_up``."""
        return peer == self._membership.rank or self.place.may_share_with(self.look_up(peer, call))


class Neighbourhood(Directory):
    """Reaches the endpoints of the members that share memory with this rank, by way of its own."""

    def __init__(self, membership: Membership, place: Place, endpoint: Endpoint) -> None:
        super().__init__(membership, place)
        self._endpoint = endpoint

    def watch(self, peer: int, call: Call) -> None:
        """Have the endpoint tell when ``peer`` is gone, now or later.

        Raises DistNetworkError when no memory can be shared with it, and what
        ``look_up`` does.
        """
        address, membership = self._address(peer, call), self._membership
        self._endpoint.watch(
            address, membership.group, membership.rank, peer, membership.describe(peer)
        )

    def fetch(self, peer: int, what: str, call: Call) -> Segment:
        """Return the memory ``what`` of ``peer``, mapped.

        Raises ``PeerLostError`` when the peer has left, and what ``watch`` raises.
        """
        address, membership = self._address(peer, call), self._membership
        name = membership.describe(peer)
        number, request = self._endpoint.ask(
            address, membership.group, membership.rank, peer, what, name
        )
        call.waiting_for = peer
        try:
            arrived = request.wait(call.deadline.remaining())
            self.check()
            if not arrived:
                raise CommunicatorTimeoutError(
                    f"{call.header}: {name} has not answered within {call.deadline.seconds:g} s",
                    peer,
                )
            call.waiting_for = None
            return adopt(request.take())
        finally:
            self._endpoint.forget(number)
            request.discard()

    def kick(self, peer: int) -> None:
        """Ask ``peer`` to empty its inbox. Never blocks; may be lost."""
        self._endpoint.kick(self._membership.group, peer)

    def _address(self, peer: int, call: Call) -> bytes:
        place, mine = self.look_up(peer, call), self.place
        if not mine.may_share_with(place):
            name = self._membership.describe(peer)
            why = mine.obstacle or place.obstacle or "it runs on another host"
            raise DistNetworkError(
                f"{name} cannot share memory with rank {self._membership.rank}: {why};"
                " expected backend 'tcp' or 'auto'"
            )
        return bytes.fromhex(place.address)


def _place_key(rank: int) -> str:
    return f"shm/{rank}"
