"""A ring buffer between one sender and one receiver of messages, in the receiver's memory.

Two counters of bytes that only rise: how many the sender has written, how many the receiver has
taken. A message is a line with ``Call.packed``, its size and 0, then its bytes, rounded up to
lines; one that is larger than the ring flows through it. Or the line has, instead of the 0, where
the bytes are in the sender's memory, who waits until the receiver has taken them from there.
"""

from __future__ import annotations

import struct
import threading

import numpy as np

from transport.call import HEADER_BYTES, CallHeader
from transport.errors import CommunicatorAbortedError, DistBackendError, PeerLostError
from transport.links.incoming import Incoming
from transport.links.mailbox import Mailbox
from transport.native import core
from transport.operands.copying import LONG, copy_bytes
from transport.shm.board.futex import LOW_HALF, Fence
from transport.shm.board.layout import WORD, Sizes, lines, pages
from transport.shm.board.segment import LINE, Segment
from transport.shm.messages.single_copy import PeerMemory

_SIZE_AND_ADDRESS = struct.Struct("<QQ")
_HEAD_LINE = struct.Struct(f"<QQ{LINE - HEADER_BYTES - _SIZE_AND_ADDRESS.size}x")
"""The same with what else there is to a line, after the header."""
CONTROL_LINES = 2
BELL, ASLEEP = 0, LINE // WORD
"""Words of an inbox: its bell, and whether its owner sleeps until that rings."""
_BROKEN, _SENDER_SLEEPS = 1, 2  # words of the sender's line, after its counter
CAPACITY = 1
"""A word of an inbox, too: the bytes of each of its rings."""
_MOST_RINGS = 4 << 20


class InboxLayout:
    """Offsets in a member's inbox: a line with the bell, one with the owner's sleeping flag, and a
    ring of ``capacity`` bytes for every member.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        self._rings = pages(LINE * (2 + CONTROL_LINES * size))
        self.nbytes = self._rings + size * capacity

    @classmethod
    def choose(cls, size: int, sizes: Sizes) -> InboxLayout:
        """Return the layout for ``size`` members, of bounded memory."""
        most = max(64 << 10, min(1 << 20, _MOST_RINGS // max(1, size - 1)))
        return cls(size, lines(sizes.ring or most))

    def ring(self, rank: int) -> tuple[int, int, int]:
        """Return where the control lines and the bytes of ``rank``'s ring are, and its capacity."""
        control = LINE * (2 + CONTROL_LINES * rank)
        return control, self._rings + rank * self.capacity, self.capacity


class _RingEnd:
    """What both ends do with bytes: ``position`` is how far this one is, ``left`` how much of the
    message under way is still to come.

    The compiled core has the same. Where ``patient`` it looks for a moment, without the
    interpreter's lock, whether the other end has gone on; this one never waits.

    The ring has ``capacity`` bytes at ``start`` of ``segment``, its control lines are at
    ``control``; of each message ``piece`` bytes at most are moved before the other end is told.
    ``number`` is that of this member, of ``step``: no two of them ring with the same value.
    """

    def __init__(
        self,
        segment: Segment,
        control: int,
        start: int,
        capacity: int,
        piece: int,
        bell: int,
        asleep: int,
        number: int,
        step: int,
        may_spin: bool,
    ) -> None:
        self.position = self.left = 0
        self.capacity = capacity
        self.piece = max(LINE, min(piece, capacity // 2) // LINE * LINE)
        self._words = segment.words
        self._futex = segment.futex
        self._data = segment.data[start : start + capacity]
        self._written = control // WORD
        self._taken = (control + LINE) // WORD
        self._bell, self._asleep = bell, asleep
        self._number, self._step = number, step
        self._rings = 0
        self._fence = Fence()

    # The sender's.

    def begin(self, packed: bytes, data: memoryview, patient: bool) -> bool:
        """Begin a message; write as much of it as there is room for, and tell the receiver.

        Returns False, and does nothing, where there is no room for its head and a first piece.
        """
        del patient
        size = data.nbytes
        room = self.capacity - (self.position - self._words[self._taken])
        if room < LINE + min(lines(size), self.piece):
            return False
        at = self.position % self.capacity  # a line never goes round the end
        if size < LONG and size <= self.piece and at + LINE + size <= self.capacity:
            self._data[at : at + LINE + size] = packed + _HEAD_LINE.pack(size, 0) + data
            self.position += LINE + lines(size)
            self.publish()
            return True
        self._data[at : at + LINE] = packed + _HEAD_LINE.pack(size, 0)
        self.position += LINE
        self.left = size
        self.publish()
        self.go_on(data, False)
        return True

    def go_on(self, data: memoryview, patient: bool) -> None:
        """Write more of the message ``data``."""
        del patient
        size, words = data.nbytes, self._words
        while self.left:
            count = min(self.left, self.piece)
            if self.capacity - (self.position - words[self._taken]) < lines(count):
                return
            done = size - self.left
            at = self.position % self.capacity
            first = min(count, self.capacity - at)
            copy_bytes(self._data[at : at + first], data[done : done + first])
            if first < count:
                copy_bytes(self._data[: count - first], data[done + first : done + count])
            self.position += lines(count)
            self.left -= count
            self.publish()

    def publish(self) -> None:
        """Let the receiver see what was written, and wake it if it sleeps."""
        words = self._words
        words[self._written] = self.position
        self._fence()
        if words[self._asleep]:
            self._rings += 1
            words[self._bell] = (self._rings * self._step + self._number) & LOW_HALF
            self._futex.wake(self._bell)

    # The receiver's.

    def take(self, into: memoryview, patient: bool) -> None:
        """Move more of a message ``into`` memory of its size, and tell the sender."""
        del patient
        words = self._words
        count = min(self.left, self.piece, words[self._written] - self.position)
        done = into.nbytes - self.left
        at = self.position % self.capacity
        first = min(count, self.capacity - at)
        copy_bytes(into[done : done + first], self._data[at : at + first])
        if first < count:
            copy_bytes(into[done + first : done + count], self._data[: count - first])
        self.position += lines(count)
        self.left -= count
        words[self._taken] = self.position
        self._fence()
        if words[self._written + _SENDER_SLEEPS]:
            self._futex.wake(self._taken)


RingEnd: type[_RingEnd] = _RingEnd if core is None else core.RingEnd


class Ring(RingEnd):
    """One end of a ring, and what its two sides say of themselves.

    It is ``where`` its control lines and its bytes begin, with how many bytes it has. ``member`` is
    this rank, of how many; ``peer`` the one at the other end.
    """

    def __init__(
        self,
        segment: Segment,
        where: tuple[int, int, int],
        member: tuple[int, int],
        peer: int,
        piece: int,
        may_spin: bool,
    ) -> None:
        super().__init__(segment, *where, piece, BELL, ASLEEP, *member, may_spin)
        control, start, capacity = where
        self.peer = peer
        self.words = segment.words
        self.written = control // WORD
        self.taken = (control + LINE) // WORD
        self.segment = segment
        self.data = segment.data[start : start + capacity]

    @property
    def broken(self) -> bool:
        """Whether the sender stopped in the middle of a message."""
        return bool(self.words[self.written + _BROKEN])


class RingWriter(Ring):
    """The sender's end, in the ``inbox`` of ``peer``. One thread at a time: who has the ``turn``.

    Raises DistBackendError where that is none.
    """

    def __init__(
        self, inbox: Segment, member: tuple[int, int], peer: int, piece: int, may_spin: bool
    ) -> None:
        rank, size = member
        layout = InboxLayout(size, inbox.words[CAPACITY])
        if layout.nbytes > inbox.nbytes:
            raise DistBackendError(f"expected an inbox of {layout.nbytes} bytes")
        super().__init__(inbox, layout.ring(rank), member, peer, piece, may_spin)
        self.position = self.words[self.written]
        self.turn = threading.RLock()

    def offer(self, packed: bytes, nbytes: int, address: int) -> None:
        """Say where a message is. Room for a line must be there."""
        at = self.position % self.capacity
        self.data[at : at + LINE] = packed + _HEAD_LINE.pack(nbytes, address)
        self.position += LINE
        self.publish()

    def set_sleeping(self, asleep: bool) -> None:
        """Say whether the sender wants to be woken when there is room."""
        self.words[self.written + _SENDER_SLEEPS] = asleep

    def give_up(self) -> None:
        """Say that the message under way will not be completed, nor any other come."""
        self.words[self.written + _BROKEN] = 1
        self.publish()

    def wake_sender(self) -> None:
        """Have a sender that sleeps look again. Any thread."""
        self.segment.futex.wake(self.taken)


class RingReader(Ring):
    """The receiver's end: moves messages into the mailbox. One thread at a time."""

    _incoming: Incoming | None = None
    _address = 0
    _closed = False
    stalled: bool = False
    given_up: bool = False
    """Whether it is known that nothing more comes, since the sender broke a message off."""

    def pending(self) -> bool:
        """Whether anything was written that has not been taken."""
        return self.words[self.written] != self.position

    @property
    def breaks(self) -> bool:
        """Whether the sender has given up, and this end does not know it yet."""
        return not self.given_up and self.broken

    @property
    def listens(self) -> bool:
        """Whether it is worth to ``pull`` when something comes."""
        return not (self.stalled or self._closed)

    @property
    def between(self) -> bool:
        """Whether no message is under way, and the next one may be begun."""
        return self._incoming is None and not (self.stalled or self._closed)

    def adopt(self, incoming: Incoming) -> None:
        """Go on with a message that was begun without the mailbox."""
        self._incoming = incoming

    def pull(self, mailbox: Mailbox, memory: PeerMemory | None, patient: bool) -> bool:
        """Move what is there, of at most one message, and make room; return whether anything was
        moved. Nothing is while the mailbox has no room for the next message.

        ``memory`` reads what is still the sender's; None: not known yet. ``patient``: see ``take``.
        """
        if self.words[self.written] == self.position or self._closed:
            return False
        incoming = self._incoming
        if incoming is None:
            try:
                incoming = self._begin(mailbox, memory)
            except CommunicatorAbortedError:
                self._closed = True  # nobody will receive from this member any more
            self.stalled = incoming is None
            if incoming is None:
                return False
        if self._address and memory is not None:
            return self._fetch(incoming, memory)
        with incoming.guard:
            self.take(incoming.buffer, patient)
        if not self.left:
            self._incoming = None
            incoming.complete()
        return True

    def _fetch(self, incoming: Incoming, memory: PeerMemory) -> bool:
        """Take the bytes of a message from its sender's memory, and let the sender go on.

        Returns False where the sender gave up; then the message is left for ``end``.
        """
        error: PeerLostError | None = None
        try:
            with incoming.guard:
                into = np.frombuffer(incoming.buffer, np.uint8)
                memory.read(self.peer, self._address, into, alone=True)
        except PeerLostError as lost:
            error = lost
        self.left = 0
        self.take(incoming.buffer, False)  # the head alone
        # The sender says that it gives up before it uses that memory for anything else.
        if self.broken:
            return False
        self._incoming = None
        if error is None:
            incoming.complete()
        else:
            incoming.fail(error)
        return True

    def end(self, error: PeerLostError) -> bool:
        """Give up the message under way because nothing more comes; False while something is
        there that was not moved.
        """
        if self.pending() and not self._closed:
            return False
        if self._incoming is not None:
            self._incoming.fail(error)
            self._incoming = None
        return True

    def _begin(self, mailbox: Mailbox, memory: PeerMemory | None) -> Incoming | None:
        at = self.position % self.capacity  # a line never goes round the end
        head = self.data[at : at + LINE]
        nbytes, self._address = _SIZE_AND_ADDRESS.unpack_from(head, HEADER_BYTES)
        if self._address and memory is None:
            return None
        incoming = mailbox.try_begin(self.peer, CallHeader.unpack(head), nbytes)
        if incoming is not None:
            self.position += LINE
            self.left = nbytes
            self._incoming = incoming
        return incoming
