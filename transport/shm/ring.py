"""A ring buffer between one sender and one receiver of messages, in the receiver's memory.

Two counters of bytes that only rise: how many the sender has written, how many the receiver has
taken. A message is a line with ``Call.packed``, its size and 0, then its bytes, rounded up to
lines; one that is larger than the ring flows through it. Or the line has, instead of the 0, where
the bytes are in the sender's memory, who waits until the receiver has taken them from there.
"""

from __future__ import annotations

import struct

import numpy as np

from transport.call import HEADER_BYTES, CallHeader
from transport.errors import CommunicatorAbortedError, PeerLostError
from transport.mailbox import Incoming, Mailbox
from transport.shm.copying import copy_bytes
from transport.shm.layout import WORD, lines
from transport.shm.segment import LINE, Segment
from transport.shm.single_copy import PeerMemory

_SIZE_AND_ADDRESS = struct.Struct("<QQ")
_HEAD_LINE = struct.Struct(f"<QQ{LINE - HEADER_BYTES - _SIZE_AND_ADDRESS.size}x")
"""The same with what else there is to a line, after the header."""
CONTROL_LINES = 2
_BROKEN, _SENDER_SLEEPS = 1, 2  # words of the sender's line, after its counter


class Ring:
    """One ring of ``capacity`` bytes at ``start``, whose two control lines are at ``control``."""

    def __init__(self, segment: Segment, control: int, start: int, capacity: int) -> None:
        self.words = segment.words
        self.written = control // WORD
        self.taken = (control + LINE) // WORD
        self.capacity = capacity
        self.futex = segment.futex
        self._data = segment.data[start : start + capacity]

    @property
    def broken(self) -> bool:
        """Whether the sender stopped in the middle of a message."""
        return bool(self.words[self.written + _BROKEN])

    def copy_in(self, position: int, data: memoryview) -> None:
        """Write ``data`` (at most ``capacity`` bytes) at a position of the stream."""
        at = position % self.capacity
        first = min(len(data), self.capacity - at)
        copy_bytes(self._data[at : at + first], data[:first])
        if first < len(data):
            copy_bytes(self._data[: len(data) - first], data[first:])

    def copy_out(self, position: int, into: memoryview) -> None:
        """Read bytes at a position of the stream."""
        at = position % self.capacity
        first = min(len(into), self.capacity - at)
        copy_bytes(into[:first], self._data[at : at + first])
        if first < len(into):
            copy_bytes(into[first:], self._data[: len(into) - first])


class RingWriter(Ring):
    """The sender's end. One thread at a time."""

    def __init__(self, segment: Segment, control: int, start: int, capacity: int) -> None:
        super().__init__(segment, control, start, capacity)
        self.position = self.words[self.written]

    def whole(self, packed: bytes, data: memoryview) -> bool:
        """Write a message at once; return False where room is missing, or the ring ends within."""
        size = len(data)
        at = self.position % self.capacity
        end = self.position + LINE + lines(size)
        if at + LINE + size > self.capacity or end - self.capacity > self.words[self.taken]:
            return False
        self._data[at : at + LINE + size] = packed + _HEAD_LINE.pack(size, 0) + data
        self.position = end
        return True

    def head(self, packed: bytes, nbytes: int, address: int = 0) -> None:
        """Write the line that announces a message. Room for it must be there."""
        line = packed + _SIZE_AND_ADDRESS.pack(nbytes, address)
        self.copy_in(self.position, memoryview(line))
        self.position += LINE

    def body(self, piece: memoryview) -> None:
        """Write some of a message's bytes; all pieces but the last are whole lines."""
        self.copy_in(self.position, piece)
        self.position += lines(len(piece))

    def publish(self) -> None:
        """Let the receiver see what was written."""
        self.words[self.written] = self.position

    def room(self) -> int:
        """Return how many bytes may be written now."""
        return self.capacity - (self.position - self.words[self.taken])

    def set_sleeping(self, asleep: bool) -> None:
        """Say whether the sender wants to be woken when there is room."""
        self.words[self.written + _SENDER_SLEEPS] = asleep

    def give_up(self) -> None:
        """Say that the message under way will not be completed, nor any other come."""
        self.words[self.written + _BROKEN] = 1


class RingReader(Ring):
    """The receiver's end: moves messages into the mailbox. One thread at a time."""

    def __init__(
        self, segment: Segment, control: int, start: int, capacity: int, src: int, piece: int
    ) -> None:
        super().__init__(segment, control, start, capacity)
        self.src = src
        self.position = 0
        self._piece = max(LINE, piece)
        self._incoming: Incoming | None = None
        self._filled = 0
        self._address = 0
        self._closed = False
        self.stalled = False

    def pending(self) -> bool:
        """Whether anything was written that has not been taken."""
        return self.words[self.written] != self.position

    def ready(self) -> bool:
        """Whether it is worth to ``pull`` again, as far as the sender's side tells."""
        return self.words[self.written] != self.position and not (self.stalled or self._closed)

    def sender_sleeps(self) -> bool:
        """Whether the sender wants to be woken. To be asked behind a fence."""
        return bool(self.words[self.written + _SENDER_SLEEPS])

    def pull(self, mailbox: Mailbox, memory: PeerMemory | None) -> bool:
        """Move what is there, at most one piece of a message, and make room; return whether
        anything was moved. Nothing is while the mailbox has no room for the next message.

        ``memory`` reads what is still the sender's; None: not known yet.
        """
        available = self.words[self.written] - self.position
        if available == 0 or self._closed:
            return False
        if self._incoming is None:
            try:
                self._begin(mailbox, memory)
            except CommunicatorAbortedError:
                self._closed = True  # nobody will receive from this member any more
        incoming = self._incoming
        self.stalled = incoming is None
        if incoming is None:
            return False
        available = self.words[self.written] - self.position
        left = incoming.buffer.nbytes - self._filled
        if self._address and memory is not None:
            return self._fetch(incoming, memory)
        count = min(left, available, self._piece)
        self.copy_out(self.position, incoming.buffer[self._filled : self._filled + count])
        self.position += lines(count)
        self._filled += count
        self.words[self.taken] = self.position
        if count == left:
            self._incoming = None
            incoming.complete()
        return True

    def _fetch(self, incoming: Incoming, memory: PeerMemory) -> bool:
        """Take the bytes of a message from its sender's memory, and let the sender go on.

        Returns False where the sender gave up; then the message is left for ``end``.
        """
        error: PeerLostError | None = None
        try:
            into = np.frombuffer(incoming.buffer, np.uint8)
            memory.read(self.src, self._address, into, alone=True)
        except PeerLostError as lost:
            error = lost
        self.words[self.taken] = self.position
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

    def _begin(self, mailbox: Mailbox, memory: PeerMemory | None) -> None:
        at = self.position % self.capacity  # a line never goes round the end
        head = self._data[at : at + LINE]
        nbytes, self._address = _SIZE_AND_ADDRESS.unpack_from(head, HEADER_BYTES)
        if self._address and memory is None:
            return
        incoming = mailbox.try_begin(self.src, CallHeader.unpack(head), nbytes)
        if incoming is not None:
            self.position += LINE
            self._incoming = incoming
            self._filled = 0
