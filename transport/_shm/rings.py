"""The two ends of a ring of messages.

The ring is in the receiver's inbox (``transport/_native/engine/ring.c``). The sender copies a
message into it, and the receiver copies it into the buffer that its mailbox has for the message.
"""

from __future__ import annotations

import threading
from typing import Any

from transport._calls.header import CallHeader
from transport._errors import CommunicatorAbortedError, DistBackendError, PeerLostError
from transport._links.incoming import IncomingMessage
from transport._links.mailbox import Mailbox
from transport._shm.segment import Segment
from transport._shm.support import may_spin, the_core


class RingWriter:
    """The sender's end, in the ``inbox`` of ``peer``. The thread that uses it holds ``turn``.

    ``member`` is this rank and the group's size. ``end`` is the engine's ``RingEnd``. Raises
    DistBackendError if ``inbox`` is invalid, OSError if the kernel has no memory for the ring.
    """

    def __init__(self, inbox: Segment, member: tuple[int, int], peer: int) -> None:
        rank, size = member
        try:
            spins = may_spin(size)
            self.end: Any = the_core().RingEnd(inbox.mapping, size, rank, rank, spins)
        except ValueError as error:
            raise DistBackendError(f"a peer's inbox: {error}") from error
        self.peer = peer
        self.turn = threading.RLock()


class RingReader:
    """The receiver's end of the ring from ``peer``, which moves messages into the mailbox.

    One thread at a time.
    """

    _incoming: IncomingMessage | None = None
    _closed = False
    stalled: bool = False
    """True if the mailbox has no room for the next message."""
    given_up: bool = False
    """True if the sender interrupted a message: no other message can follow."""
    damaged: bool = False
    """True if the sender wrote impossible values: no other message is received."""

    def __init__(self, inbox: Segment, member: tuple[int, int], peer: int) -> None:
        rank, size = member
        self._core = core = the_core()
        self.end: Any = core.RingEnd(inbox.mapping, size, peer, rank, may_spin(size))
        self.peer = peer

    @property
    def breaks(self) -> bool:
        """True if the ring is broken or damaged, and ``given_up`` is not set yet."""
        return not self.given_up and (self.damaged or self.end.broken)

    @property
    def listens(self) -> bool:
        """True if ``pull`` can move messages when they arrive."""
        return not (self.stalled or self._closed)

    @property
    def between(self) -> bool:
        """True if no message is partly received, and the next one may be begun."""
        return self._incoming is None and not (self.stalled or self._closed or self.end.in_use)

    def adopt(self, incoming: IncomingMessage) -> None:
        """Continue a message that was begun without the mailbox."""
        self._incoming = incoming
        self.end.take_back()

    def pull(self, mailbox: Mailbox, mode: int) -> bool:
        """Move the available bytes of at most one message; return whether any were moved.

        While the mailbox has no room for the next message, none are moved. ``mode``: how long to
        wait for the rest of a message.
        """
        end = self.end
        if self._closed or not end.pending:
            return False
        incoming = self._incoming or self._begin(mailbox)
        if incoming is None:
            return False
        with incoming.guard:
            status = end.take(incoming.buffer, mode)
        if status == self._core.DAMAGED:
            self._refuse()
            return False
        if not end.left:
            self._incoming = None
            incoming.complete()
        return True

    def _refuse(self) -> None:
        self.damaged = self._closed = True

    def end_with(self, error: PeerLostError) -> bool:
        """Fail the incomplete message after the sender's end; return False if bytes in the ring
        have to be moved first.
        """
        if self.end.untaken and not self._closed:
            return False
        if self._incoming is not None:
            self._incoming.fail(error)
            self._incoming = None
        return True

    def _begin(self, mailbox: Mailbox) -> IncomingMessage | None:
        head = self.end.peek()
        if head is None:
            self._refuse()
            return None
        packed, nbytes = head
        try:
            incoming = mailbox.try_begin(self.peer, CallHeader.unpack(packed), nbytes)
        except CommunicatorAbortedError:
            self._closed = True
            return None
        self.stalled = incoming is None
        if incoming is not None:
            self.end.accept(nbytes)
            self._incoming = incoming
        return incoming
