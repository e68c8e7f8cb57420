"""The two ends of a ring of messages: the engine's, and what Python keeps of them.

The ring lies in the receiver's inbox (``transport/_native/engine/ring.c``). A sender copies into
it, and the receiver out of it, into the memory that its mailbox has for the message.
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
    """The sender's end, in the ``inbox`` of ``peer``. One thread at a time: the owner of ``turn``.

    ``member`` is this rank, of how many. ``end`` is the engine's. Raises DistBackendError where
    ``inbox`` is none, OSError where the kernel has no memory for the ring.
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
    """The receiver's end of the ring from ``peer``: moves messages into the mailbox. One thread at
    a time.
    """

    _incoming: IncomingMessage | None = None
    _closed = False
    stalled: bool = False
    """True if the mailbox has no room for the next message."""
    given_up: bool = False
    """True if the sender broke a message off, so that no more can come."""
    damaged: bool = False
    """True if the sender wrote impossible values; no more is taken then."""

    def __init__(self, inbox: Segment, member: tuple[int, int], peer: int) -> None:
        rank, size = member
        self._core = core = the_core()
        self.end: Any = core.RingEnd(inbox.mapping, size, peer, rank, may_spin(size))
        self.peer = peer

    @property
    def breaks(self) -> bool:
        """True if the sender has given up, and this end does not know it yet."""
        return not self.given_up and (self.damaged or self.end.broken)

    @property
    def listens(self) -> bool:
        """True if it is worth calling ``pull`` when data comes."""
        return not (self.stalled or self._closed)

    @property
    def between(self) -> bool:
        """True if no message is under way, and the next one may be begun."""
        return self._incoming is None and not (self.stalled or self._closed or self.end.in_use)

    def adopt(self, incoming: IncomingMessage) -> None:
        """Go on with a message that was begun without the mailbox."""
        self._incoming = incoming
        self.end.take_back()

    def pull(self, mailbox: Mailbox, mode: int) -> bool:
        """Move what is there, of at most one message, and make room; return whether anything was
        moved. Nothing is while the mailbox has no room for the next message.

        ``mode``: how long to wait for a message that is under way.
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
        """Give up the message under way because nothing more comes; False while something is
        there that was not moved.
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
            self._closed = True  # nobody will receive from this member any more
            return None
        self.stalled = incoming is None
        if incoming is not None:
            self.end.accept(nbytes)
            self._incoming = incoming
        return incoming
