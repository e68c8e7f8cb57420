"""The places of a group's members, from the group's store, and the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys
from transport._errors import CommunicatorTimeoutError, DistNetworkError
from transport._place import Place, this_place
from transport._shm.meeting.endpoint import ShmEndpoint
from transport._shm.segment import Segment, adopt


class HostPeers(PeerKeys):
    """The ``members`` that share memory with this rank, which reaches their endpoints by way of its
    own. Several threads.
    """

    def __init__(
        self, membership: Membership, members: Sequence[int], endpoint: ShmEndpoint
    ) -> None:
        super().__init__(membership)
        self.members: Sequence[int] = members
        self._endpoint = endpoint
        self._place = this_place(endpoint.address)
        self._places: dict[int, Place] = {membership.rank: self._place}

    def publish(self) -> None:
        """Tell the other members where this rank is."""
        self._store.post(_place_key(self._membership.rank), self._place.encode())

    def look_up(self, peer: int, call: Call) -> Place:
        """Return where ``peer`` is, waiting until it has said so."""
        place = self._places.get(peer)
        if place is None:
            place = Place.decode(self.read(_place_key(peer), peer, call))
            self._places[peer] = place
        return place

    def look_up_all(self, call: Call) -> None:
        """Wait until all ``members`` have said where they are: one question for all."""
        peers = [peer for peer in self.members if peer not in self._places]
        for peer, data in self.read_all(_place_key, peers, call).items():
            self._places[peer] = Place.decode(data)

    def is_known(self, peer: int) -> bool:
        """True if ``peer`` has said where it is."""
        return peer in self._places or self._store.check([_place_key(peer)])

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
        number, request = self._endpoint.request(
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
        place, mine = self.look_up(peer, call), self._place
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
