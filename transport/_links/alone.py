"""The communicator of a group of one, for all transports."""

from __future__ import annotations

from transport._algorithms.alone import Alone
from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._links.messaging import MessagingCommunicator

_SEGMENT = 256 << 10


class AloneCommunicator(MessagingCommunicator, Alone):
    """The communicator of a group's only member, on any transport (``BackendEntry.make``).

    Its calls, errors and messages to itself are those of any transport. It needs no thread, socket
    or segment.
    """

    takes_gaps = True

    def __init__(self, membership: Membership) -> None:
        MessagingCommunicator.__init__(self, membership)
        Alone.__init__(self, _SEGMENT)

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        raise IndexError(f"{self.membership.group} has one member, got rank {dst}")
