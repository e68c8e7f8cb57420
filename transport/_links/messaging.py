"""Point-to-point calls over a mailbox."""

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
    """Implements point to point over ``post`` and ``mailbox``.

    A transport implements ``post``, and passes arriving messages to ``mailbox``. Its ``abort`` and
    ``close`` call these ones first, then release the transport's own resources.
    """

    def __init__(self, membership: Membership, mailbox: Mailbox | None = None) -> None:
        super().__init__(membership)
        self.mailbox = Mailbox(membership) if mailbox is None else mailbox

    @abstractmethod
    def post(self, call: Call, data: memoryview, dst: int) -> None:
        """Send a point-to-point message to ``dst`` (never this rank).

        Returns when ``data`` may be reused. ``call.packed`` is sent with the message (its kind is
        SEND, and ``header.extra`` is the tag), and the receiver passes it to ``mailbox.begin``.
        Thread-safe.
        """

    def abort(self, reason: str) -> None:
        """Store ``reason`` and wake point-to-point calls; transports then break their links."""
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
