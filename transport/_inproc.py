"""A transport whose ranks are threads of one process.

Members meet in a ``_Hub``, an object that the group's store shares inside the process. Between each
two of them there is a channel for each direction: a queue of frames. A small frame is copied into
the queue. A large frame, or any frame while the queue is full, is lent: it stays in the sender's
memory until the receiver has copied it. So queues are bounded and large data moves once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from transport._call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.runtime import Membership
from transport._deadline import Deadline
from transport._errors import CommunicatorAbortedError, PeerLostError
from transport._header import CallHeader
from transport._interrupts import Condition
from transport._link import Link, OnPiece, Request, waited_for, wrong_frame
from transport._links.alone import AloneCommunicator
from transport._links.communicator import LinkCommunicator
from transport._links.mailbox import Mailbox

EAGER_BYTES = 64 << 10
HIGH_WATER = 1 << 20
PIECE_BYTES = 256 << 10
_FRAME_COST = 64
"""A frame's share of the queue's limit besides its data: it bounds empty frames as well."""


@dataclass(slots=True, eq=False)
class _QueuedFrame:
    """A frame in a queue; ``lent`` when ``data`` is the sender's own memory."""

    packed: bytes
    tag: int
    data: memoryview
    lent: bool
    started: bool = False
    taken: bool = False


class _FrameQueue:
    """Frames from one member to another. Its methods raise ``_Cut`` when an end is gone."""

    def __init__(self, eager: int) -> None:
        self._eager = eager
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._frames: deque[_QueuedFrame] = deque()
        self._queued = 0
        self._cut = False
        self._sender_left = False
        self._receiver_left = False

    def offer(self, call: Call, data: memoryview, tag: int = 0) -> _QueuedFrame:
        """Queue a frame without waiting. One that is lent must be awaited with ``wait_taken``."""
        with self._lock:
            if self._cut or self._receiver_left:
                raise _Cut
            cost = data.nbytes + _FRAME_COST
            lent = data.nbytes > self._eager or self._queued + cost > HIGH_WATER
            frame = _QueuedFrame(call.packed, tag, data if lent else memoryview(bytes(data)), lent)
            if not lent:
                self._queued += cost
            self._frames.append(frame)
            self._changed.notify_all()
            return frame

    def wait_taken(self, frame: _QueuedFrame, deadline: Deadline) -> bool:
        """Wait until a lent frame has been copied. False, and the frame is taken back, when the
        deadline passes first.
        """
        with self._lock:
            while True:
                if frame.taken:
                    return True
                # While the receiver copies, the memory must stay as it is, whatever happens.
                if not frame.started and (self._cut or self._receiver_left):
                    raise _Cut
                if frame.started:
                    self._changed.wait()
                    continue
                arrived = self._changed.wait(deadline.remaining())
                if not arrived and deadline.expired and not frame.started:
                    self._frames.remove(frame)
                    return False

    def begin_take(
        self, deadline: Deadline, packed: bytes = b"", tag: int = 0
    ) -> _QueuedFrame | None:
        """Wait for the next frame of the call ``packed`` with ``tag``, or one of another call, for
        which there is no sense in waiting; None when the deadline passes first.
        """
        with self._lock:
            while True:
                if self._cut:
                    raise _Cut
                for frame in self._frames:
                    if frame.tag == tag or frame.packed != packed:
                        self._frames.remove(frame)
                        frame.started = True
                        return frame
                if self._sender_left:
                    raise _Cut
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    return None

    def end_take(self, frame: _QueuedFrame) -> None:
        """Give the frame's memory back to its sender."""
        with self._lock:
            frame.taken = True
            if frame.lent:
                self._changed.notify_all()
            else:
                self._queued -= frame.data.nbytes + _FRAME_COST

    def cut(self) -> None:
        """Wake both ends; nothing more arrives."""
        with self._lock:
            self._cut = True
            self._changed.notify_all()

    def leave(self, as_sender: bool) -> None:
        """Close one end; messages that it sent before still arrive."""
        with self._lock:
            if as_sender:
                self._sender_left = True
            else:
                self._receiver_left = True
            self._changed.notify_all()


class _Cut(Exception):
    """The other end of a channel, or this one, was aborted or closed."""


class _Hub:
    """The meeting point of a group's members: channels and mailboxes, made at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined: set[int] = set()
        self._aborted: set[int] = set()
        self._left: set[int] = set()
        self._channels: dict[tuple[int, int], _FrameQueue] = {}
        # By member, its channels: who leaves must not look at everybody's.
        self._ends: dict[int, tuple[list[_FrameQueue], list[_FrameQueue]]] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        # Lost members with their reasons, and waiting threads: shared by all mailboxes.
        self.lost: dict[int, Exception] = {}
        """The lost members, from which nothing more comes."""
        self._waiting: set[Mailbox] = set()

    def join(self, membership: Membership) -> Mailbox:
        """Enter as the member ``membership.rank`` and return its mailbox."""
        with self._lock:
            if len(self._left) == membership.size:  # everybody has closed: start afresh
                for members in (self._joined, self._aborted, self._left, self.lost):
                    members.clear()
            if membership.rank in self._joined:
                raise ValueError(
                    f"rank {membership.rank} of group {membership.group!r} has joined already;"
                    " expected one communicator for each rank"
                )
            self._joined.add(membership.rank)
        return self.mailbox(membership, membership.rank)

    def mailbox(self, membership: Membership, rank: int) -> Mailbox:
        """Return the mailbox of member ``rank``, which need not have joined yet."""
        with self._lock:
            box = self._mailboxes.get(rank)
            if box is None:
                place = replace(membership, rank=rank)
                box = self._mailboxes[rank] = Mailbox(place, lost=self.lost, waiting=self._waiting)
            return box

    def channel(self, src: int, dst: int, eager: int) -> _FrameQueue:
        """Return the channel from ``src`` to ``dst``."""
        channel = self._channels.get((src, dst))
        if channel is not None:
            return channel
        made = _FrameQueue(eager)
        # Without the lock, which all members would want at once. Each of these steps is atomic,
        # and who leaves says so before it looks for its channels.
        channel = self._channels.setdefault((src, dst), made)
        if channel is made:
            self._ends_of(src)[0].append(channel)
            self._ends_of(dst)[1].append(channel)
            if src in self._aborted or dst in self._aborted:
                channel.cut()
            if src in self._left:
                channel.leave(as_sender=True)
            if dst in self._left:
                channel.leave(as_sender=False)
        return channel

    def _ends_of(self, rank: int) -> tuple[list[_FrameQueue], list[_FrameQueue]]:
        """Return the channels that lead away from ``rank``, and those that lead there."""
        return self._ends.get(rank) or self._ends.setdefault(rank, ([], []))

    def leave(self, membership: Membership, aborted: bool) -> None:
        """Remove the member, and wake all that wait for it."""
        rank = membership.rank
        how = "aborted" if aborted else "closed its communicator"
        error = PeerLostError(f"{membership.describe(rank)} {how}", rank)
        with self._lock:
            (self._aborted if aborted else self._left).add(rank)
            outward, inward = map(list, self._ends_of(rank))
            for channels, as_sender in ((outward, True), (inward, False)):
                for channel in channels:
                    if aborted:
                        channel.cut()
                    else:
                        channel.leave(as_sender)
            self._lose(rank, error)
            if len(self._left) == membership.size:
                self._channels.clear()
                self._ends.clear()
                self._mailboxes.clear()

    def lose(self, rank: int, error: Exception) -> None:
        """Say to all that nothing more comes from a member that need not have joined."""
        with self._lock:
            self._lose(rank, error)

    def _lose(self, rank: int, error: Exception) -> None:
        if rank in self.lost:
            return
        self.lost[rank] = error
        # Most wait for nothing, and each that does has said so before it looked at who is lost.
        own = self._mailboxes.get(rank)
        for box in list(self._waiting):
            if box is not own:
                box.fail(rank, error)


class InprocLink(Link):
    """A link over the two channels between this rank and ``peer``."""

    def __init__(self, owner: InprocCommunicator, peer: int) -> None:
        self.peer = peer
        self._owner = owner

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> _InprocSend:
        try:
            frame = self._outward.offer(call, data, tag)
        except _Cut:
            raise self._gone() from None
        return _InprocSend(self, call, frame)

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> _InprocReceive:
        return _InprocReceive(self, call, into, tag)

    # Many algorithms send to one neighbour and receive from another one.

    @cached_property
    def _outward(self) -> _FrameQueue:
        return self._owner.channel(self._owner.rank, self.peer)

    @cached_property
    def _inward(self) -> _FrameQueue:
        return self._owner.channel(self.peer, self._owner.rank)

    @property
    def _name(self) -> str:
        return self._owner.membership.describe(self.peer)

    def finish_send(self, call: Call, frame: _QueuedFrame) -> None:
        """Wait until the peer has taken a frame that was lent."""
        call.waiting_for = self.peer
        try:
            taken = self._outward.wait_taken(frame, call.deadline)
        except _Cut:
            raise self._gone() from None
        if not taken:
            raise waited_for(call, self.peer, self._name, "to take data")
        call.waiting_for = None

    def receive(self, call: Call, into: memoryview, tag: int, on_piece: OnPiece | None) -> None:
        """Wait for a frame, and copy it."""
        call.waiting_for = self.peer
        try:
            frame = self._inward.begin_take(call.deadline, call.packed, tag)
        except _Cut:
            raise self._gone() from None
        if frame is None:
            raise waited_for(call, self.peer, self._name, "to send data")
        call.waiting_for = None
        try:
            size, sent = into.nbytes, frame.data.nbytes
            if frame.packed != call.packed or sent != size:
                header = CallHeader.unpack(frame.packed)
                raise wrong_frame(call, size, self.peer, self._name, header, sent)
            for start in range(0, size, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, size)
                into[start:stop] = frame.data[start:stop]
                if on_piece is not None:
                    on_piece(stop)
        finally:
            self._inward.end_take(frame)

    def _gone(self) -> CommunicatorAbortedError | PeerLostError:
        if self._owner.abort_reason is not None:
            return CommunicatorAbortedError(self._owner.abort_reason)
        return PeerLostError(f"{self._name} is gone", self.peer)


class _InprocSend(Request):
    """A frame that the peer takes."""

    __slots__ = ("_call", "_frame", "_link")

    def __init__(self, link: InprocLink, call: Call, frame: _QueuedFrame) -> None:
        self._link = link
        self._call = call
        self._frame = frame
        self.done = not frame.lent

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self._link.finish_send(self._call, self._frame)
            self.done = True


class _InprocReceive(Request):
    """A frame that its receiver copies when it waits."""

    __slots__ = ("_call", "_into", "_link", "_tag")

    def __init__(self, link: InprocLink, call: Call, into: memoryview, tag: int) -> None:
        self._link = link
        self._call = call
        self._into = into
        self._tag = tag
        self.done = False

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self._link.receive(self._call, self._into, self._tag, on_piece)
            self.done = True


class InprocCommunicator(LinkCommunicator):
    """A member of a group of threads. Its store must be one that lives in this process.

    Frames of up to ``eager_bytes`` are queued, up to ``HIGH_WATER`` bytes a channel.
    """

    tuned_as = "inproc"

    def __init__(
        self,
        membership: Membership,
        table: Thresholds | None = None,
        eager_bytes: int = EAGER_BYTES,
    ) -> None:
        super().__init__(membership, table)
        self._eager = eager_bytes
        self._hub = membership.store.in_process("inproc", _Hub)
        self.mailbox = self._hub.join(membership)
        self._links: dict[int, InprocLink] = {}
        self._closed = False

    def link(self, peer: int, call: Call) -> InprocLink:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = InprocLink(self, peer)
        return link

    def channel(self, src: int, dst: int) -> _FrameQueue:
        """Return the channel from ``src`` to ``dst``; this rank is one of them."""
        return self._hub.channel(src, dst, self._eager)

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        box = self._hub.mailbox(self.membership, dst)
        try:
            box.deliver(self.rank, call.header, data, call.deadline)
        except CommunicatorAbortedError:
            self.check_open()
            name = self.membership.describe(dst)
            raise PeerLostError(f"send to {name}: it is gone", dst) from None

    def lose(self, peer: int, reason: str) -> None:
        self._hub.lose(peer, PeerLostError(reason, peer))

    @property
    def lost(self) -> Collection[int]:
        return self._hub.lost

    def abort(self, reason: str) -> None:
        if self.abort_reason is None:
            super().abort(reason)
            self._hub.leave(self.membership, aborted=True)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        super().close()
        self._hub.leave(self.membership, aborted=False)
        self._links.clear()


def make_alone(membership: Membership) -> AloneCommunicator:
    """Make the communicator of a group of one; its store must be one of this process, too."""
    membership.store.in_process("inproc", _Hub)
    return AloneCommunicator(membership)
