"""Links and communicators between threads of one process."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from transport._calls.call import Call
from transport._calls.header import CallHeader
from transport._choosing.choice import Thresholds
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorAbortedError, PeerLostError
from transport._inproc.frame_queue import FrameQueue, FrameQueueCut, QueuedFrame
from transport._inproc.hub import InprocHub
from transport._link import Link, OnPiece, Request, waited_for, wrong_frame
from transport._links.alone import AloneCommunicator
from transport._links.communicator import LinkCommunicator

EAGER_BYTES = 64 << 10
PIECE_BYTES = 256 << 10


class InprocLink(Link):
    """A link over the two frame queues between this rank and ``peer``."""

    def __init__(self, owner: InprocCommunicator, peer: int) -> None:
        self.peer = peer
        self._owner = owner

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> _InprocSend:
        try:
            frame = self._outward.offer(call, data, tag)
        except FrameQueueCut:
            raise self._gone_error() from None
        return _InprocSend(self, call, frame)

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> _InprocReceive:
        return _InprocReceive(self, call, into, tag)

    # Created lazily: many algorithms only send to one neighbour and only receive from another.

    @cached_property
    def _outward(self) -> FrameQueue:
        return self._owner.channel(self._owner.rank, self.peer)

    @cached_property
    def _inward(self) -> FrameQueue:
        return self._owner.channel(self.peer, self._owner.rank)

    @property
    def _name(self) -> str:
        return self._owner.membership.describe(self.peer)

    def finish_send(self, call: Call, frame: QueuedFrame) -> None:
        """Wait until the peer has copied a lent frame."""
        call.waiting_for = self.peer
        try:
            taken = self._outward.wait_taken(frame, call.deadline)
        except FrameQueueCut:
            raise self._gone_error() from None
        if not taken:
            raise waited_for(call, self.peer, self._name, "to receive data")
        call.waiting_for = None

    def receive(self, call: Call, into: memoryview, tag: int, on_piece: OnPiece | None) -> None:
        """Wait for the next frame with ``tag``, and copy it to ``into``."""
        call.waiting_for = self.peer
        try:
            frame = self._inward.begin_take(call.deadline, call.packed, tag)
        except FrameQueueCut:
            raise self._gone_error() from None
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

    def _gone_error(self) -> CommunicatorAbortedError | PeerLostError:
        if self._owner.abort_reason is not None:
            return CommunicatorAbortedError(self._owner.abort_reason)
        return PeerLostError(f"{self._name} is gone", self.peer)


class _InprocSend(Request):
    """A sent frame, done once the peer has copied it."""

    __slots__ = ("_call", "_frame", "_link")

    def __init__(self, link: InprocLink, call: Call, frame: QueuedFrame) -> None:
        self._link = link
        self._call = call
        self._frame = frame
        self.done = not frame.lent

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self._link.finish_send(self._call, self._frame)
            self.done = True


class _InprocReceive(Request):
    """A receive, which copies its frame in ``wait``."""

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
    """A member of a group of threads, whose store must be in this process.

    Frames of up to ``eager_bytes`` are copied to a queue, which holds up to ``HIGH_WATER`` bytes.
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
        self._hub = membership.store.in_process("inproc", InprocHub)
        self.mailbox = self._hub.join(membership)
        self._links: dict[int, InprocLink] = {}
        self._closed = False

    def link(self, peer: int, call: Call) -> InprocLink:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = InprocLink(self, peer)
        return link

    def channel(self, src: int, dst: int) -> FrameQueue:
        """Return the frame queue from ``src`` to ``dst``, one of which is this rank."""
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
    """Make the communicator of a group of one, whose store must also be in this process."""
    membership.store.in_process("inproc", InprocHub)
    return AloneCommunicator(membership)
