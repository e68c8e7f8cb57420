"""Point-to-point calls over a mailbox: the base of communicators that have one."""

from __future__ import annotations

from abc import abstractmethod

from transport._calls.call import Call
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._errors import PeerLostError
from transport._links.mailbox import Mailbox
from transport._operands.flat import as_bytes
from transport._operands.reduce_op import Flat


class MessagingCommunicator(Communicator):
    """Has point to point over ``post`` and ``mailbox``.

    A transport provides ``post``, hands what arrives to ``mailbox``, and extends ``abort`` and
    ``close`` (calling these first) by whatever it holds itself.
    """

    def __init__(self, membership: Membership, mailbox: Mailbox | None = None) -> None:
        super().__init__(membership)
        self.mailbox = Mailbox(membership) if mailbox is None else mailbox

    @abstractmethod
    def post(self, call: Call, data: memoryview, dst: int) -> None:
        """Send a point-to-point message to ``dst`` (never this rank).

        Returns when ``data`` may be reused. ``call.packed`` travels with the message (kind SEND;
        ``header.extra`` is the tag), and the other side gives it to ``mailbox.begin``. Any number
        of threads may call it at once.
        """

    def abort(self, reason: str) -> None:
        """Remember ``reason`` and wake point-to-point calls; transports then break their links."""
        self._stop(reason)

    def close(self) -> None:
        """Wake point-to-point calls of this rank; transports then close their links."""
        # Not ``abort``, which transports extend to break links: messages already sent must still
        # arrive.
        self._stop("the communicator was closed")

    def _stop(self, reason: str) -> None:
        if self.abort_reason is None:
            self.abort_reason = reason
        self.mailbox.abort(reason)

    # Point to point.

    def send(self, call: Call, buffer: Flat, dst: int, tag: int) -> None:
        self.check_open()
        data = as_bytes(buffer)
        if dst == self.rank:
            self.mailbox.deliver(self.rank, call.header, data, call.deadline)
        else:
            call.waiting_for = dst
            self.post(call, data, dst)
            call.waiting_for = None

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        return self.mailbox.recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:
        self.mailbox.fail(peer, PeerLostError(reason, peer))

    @property
    def receiving(self) -> bool:
        return self.mailbox.receiving

    def left_over(self) -> list[str]:
        return self.mailbox.left_over()
