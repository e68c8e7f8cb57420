"""Collectives and messages over MPI."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from contextlib import suppress

from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorTimeoutError, DistStoreError, PeerLostError
from transport._links.alone import AloneCommunicator
from transport._links.communicator import LinkCommunicator
from transport._links.mailbox import Mailbox
from transport._mpi.inbox import MpiInbox
from transport._mpi.library import joined, wait
from transport._mpi.link import MpiFrame, MpiLink
from transport._operands.reduce_op import Flat


class MpiCommunicator(LinkCommunicator):
    """A communicator whose members are processes of one MPI job; global ranks are MPI's ranks.

    All groups share one MPI communicator and use different tags, so creating a group involves only
    its members and sends no MPI message. ``abort`` wakes only this rank: MPI has no channel to
    break, so peers detect the abort through the job's event log.

    Events may overtake messages. A leaving rank therefore stores the number of messages that it has
    sent to each member. A member treats it as lost only after receiving that many.
    """

    tuned_as = "mpi"

    def __init__(self, membership: Membership, table: Thresholds | None = None) -> None:
        super().__init__(membership, table)
        self._process = joined()
        store = membership.store
        # A group that is created again, after it was closed or has failed, gets another tag.
        generation = self._generation = store.add(f"mpi-joined/{self.rank}", 1)
        self._tag = self._process.agree_on_tag(
            lambda number: store.compare_set(f"mpi-tag/{generation}", "", number)
        )
        # Unreceived messages stay in MPI, so the mailbox needs no limit.
        self.mailbox = Mailbox(membership, limit=sys.maxsize)
        self._inbox = MpiInbox(self._process, membership, self.mailbox, self._tag + 1)
        self._links: dict[int, MpiLink] = {}
        self._sent_lock = threading.Lock()
        self._sent: Counter[int] = Counter()

    def link(self, peer: int, call: Call) -> MpiLink:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = MpiLink(self, self._process, peer, self._tag)
        return link

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        rank = self.membership.ranks[dst]
        with MpiFrame(self._process, call, data, rank, self._tag + 1) as frame:
            with self._sent_lock:
                self._sent[dst] += 1
            if not wait(frame.requests, call.deadline, self.check_open):
                raise CommunicatorTimeoutError(
                    f"{call.header}: {self.membership.describe(dst)} did not receive the message "
                    f"within {call.deadline.seconds:g} s",
                    dst,
                )

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        if src == self.rank:
            return super().recv(call, buffer, src, tag)
        with self._inbox.wanting(src):
            return super().recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:
        sent = 0
        with suppress(DistStoreError):
            store, key = self.membership.store, self._sent_key(peer)
            if store.check([key]):
                sent = json.loads(store.get(key)).get(str(self.rank), 0)
        self._inbox.lose(peer, sent, PeerLostError(reason, peer))

    def _sent_key(self, rank: int) -> str:
        return f"mpi-sent/{self._generation}/{rank}"

    def close(self) -> None:
        if self._sent and self.abort_reason is None:
            with suppress(DistStoreError):
                self.membership.store.set(self._sent_key(self.rank), json.dumps(self._sent))
        super().close()
        self._inbox.close()


def make_alone(membership: Membership) -> AloneCommunicator:
    """Make the communicator of a group of one, whose process must have joined MPI, too."""
    joined()
    return AloneCommunicator(membership)
