"""The group's members on this host: their addresses, from the group's store, and their memory."""

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
    """The ``members`` that share memory with this rank, whose own endpoint is ``endpoint``.

    Thread-safe.
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
        """Publish this rank's place in the store."""
        self._store.post(_place_key(self._membership.rank), self._place.encode())

    def look_up(self, peer: int, call: Call) -> Place:
        """Return the place of ``peer``; wait until the peer has published it."""
        place = self._places.get(peer)
        if place is None:
            place = Place.decode(self.read(_place_key(peer), peer, call))
            self._places[peer] = place
        return place

    def look_up_all(self, call: Call) -> None:
        """Wait until all ``members`` have published their places, with one request to the store."""
        peers = [peer for peer in self.members if peer not in self._places]
        for peer, data in self.read_all(_place_key, peers, call).items():
            self._places[peer] = Place.decode(data)

    def is_known(self, peer: int) -> bool:
        """True if ``peer`` has published its place."""
        return peer in self._places or self._store.check([_place_key(peer)])

    def watch(self, peer: int, call: Call) -> None:
        """Let the endpoint report the loss of ``peer``, now or later.

        Raises DistNetworkError if ``peer`` cannot share memory, and the errors of ``look_up``.
        """
        address, membership = self._address(peer, call), self._membership
        self._endpoint.watch(
            address, membership.group, membership.rank, peer, membership.describe(peer)
        )

    def fetch(self, peer: int, what: str, call: Call) -> Segment:
        """Map and return the memory ``what`` of ``peer``.

        Raises ``PeerLostError`` if the peer has left, and the errors of ``watch``.
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
        """Ask ``peer`` to empty its inbox. Never blocks; the request may be lost."""
        self._endpoint.kick(self._membership.group, peer)

    def _address(self, peer: int, call: Call) -> bytes:
        place, mine = self.look_up(peer, call), self._place
        if not mine.may_share_with(place):
            name = self._membership.describe(peer)
            elsewhere = "it runs on another host, or in another network namespace"
            why = mine.obstacle or place.obstacle or elsewhere
            raise DistNetworkError(
                f"{name} cannot share memory with rank {self._membership.rank}: {why};"
                " expected backend 'tcp' or 'auto'"
            )
        return bytes.fromhex(place.address)


def _place_key(rank: int) -> str:
    return f"shm/{rank}"
