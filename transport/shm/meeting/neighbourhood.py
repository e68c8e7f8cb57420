"""The members of a group that share memory with this rank, and what memory they give."""

from __future__ import annotations

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.errors import CommunicatorTimeoutError, DistNetworkError
from transport.place import Place
from transport.shm.board.patience import Patience
from transport.shm.board.segment import Segment, adopt
from transport.shm.meeting.directory import Directory
from transport.shm.meeting.endpoint import Endpoint


class Neighbourhood:
    """Reaches other members' endpoints. Several threads; a cancelled ``directory`` ends waits."""

    def __init__(
        self, membership: Membership, endpoint: Endpoint, directory: Directory, patience: Patience
    ) -> None:
        self._membership = membership
        self._endpoint = endpoint
        self._directory = directory
        self._patience = patience

    def watch(self, peer: int, call: Call) -> None:
        """Have the endpoint tell when ``peer`` is gone, now or later.

        Raises DistNetworkError when no memory can be shared with it, and what
        ``Directory.look_up`` does.
        """
        address = bytes.fromhex(self._find(peer, call).address)
        membership = self._membership
        self._endpoint.watch(
            address, membership.group, membership.rank, peer, membership.describe(peer)
        )

    def fetch(self, peer: int, what: str, call: Call) -> Segment:
        """Return the memory ``what`` of ``peer``, mapped.

        Raises ``PeerLostError`` when the peer has left, and what ``watch`` raises.
        """
        address = bytes.fromhex(self._find(peer, call).address)
        membership = self._membership
        name = membership.describe(peer)
        number, reply = self._endpoint.ask(
            address, membership.group, membership.rank, peer, what, name
        )
        call.waiting_for = peer
        arrived = reply.wait(call.deadline.remaining())
        try:
            self._directory.check()
        except BaseException:
            reply.discard()
            raise
        if not arrived and not reply.wait(0):
            self._endpoint.forget(number)
            reply.discard()
            raise CommunicatorTimeoutError(
                f"{call.header}: {name} has not answered within {call.deadline.seconds:g} s", peer
            )
        call.waiting_for = None
        return adopt(reply.take())

    def _find(self, peer: int, call: Call) -> Place:
        place, mine = self._directory.look_up(peer, call), self._directory.place
        if not mine.may_share_with(place):
            name = self._membership.describe(peer)
            why = mine.obstacle or place.obstacle or "it runs on another host"
            raise DistNetworkError(
                f"{name} cannot share memory with rank {self._membership.rank}: {why};"
                " expected backend 'tcp' or 'auto'"
            )
        if place.pid == mine.pid:
            self._patience.share_process()
        return place
