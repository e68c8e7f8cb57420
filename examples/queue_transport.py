"""A complete custom transport: queues between threads of one process.

    python examples/queue_transport.py

It uses only public names of ``transport``, which docs/inside/adding-a-transport.md explains. All
collectives come from ``LinkCommunicator``. This file only moves frames between members, and
notifies the others when a member has left.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

import numpy as np

import meshlib as dist
from meshlib.testing import run_ranks
from transport import (
    Call,
    CallHeader,
    CommunicatorAbortedError,
    Condition,
    Deadline,
    Link,
    LinkCommunicator,
    Mailbox,
    Membership,
    OnPiece,
    PeerLostError,
    Request,
    waited_for,
    wrong_frame,
)


class Wire:
    """A queue of frames from one member to another."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self.ended = False

    def put(self, packed: bytes, data: memoryview) -> bool:
        """Add a frame; return False if the sender or the receiver has left."""
        with self._changed:
            if not self.ended:
                self._frames.append((packed, bytes(data)))
                self._changed.notify_all()
            return not self.ended

    def take(self, deadline: Deadline) -> tuple[bytes, bytes] | None:
        """Return the next frame, or None past the deadline or after the last frame."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self.ended, deadline.remaining())
            return self._frames.popleft() if self._frames else None

    def end(self, at_once: bool) -> None:
        """Wake both ends. Frames that were sent still arrive, unless ``at_once``."""
        with self._changed:
            self.ended = True
            if at_once:
                self._frames.clear()
            self._changed.notify_all()


class Hub:
    """The shared state of one group: wires, mailboxes, and the members that have left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wires: dict[tuple[int, int], Wire] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._left: dict[int, Exception] = {}

    def wire(self, src: int, dst: int) -> Wire:
        """Return the wire from ``src`` to ``dst``."""
        with self._lock:
            wire = self._wires.setdefault((src, dst), Wire())
            wire.ended = wire.ended or src in self._left or dst in self._left
            return wire

    def mailbox(self, membership: Membership, rank: int) -> Mailbox:
        """Return the mailbox of the member ``rank``, which may not have joined yet."""
        with self._lock:
            if rank not in self._mailboxes:
                box = self._mailboxes[rank] = Mailbox(replace(membership, rank=rank))
                for peer, error in self._left.items():
                    box.fail(peer, error)
            return self._mailboxes[rank]

    def leave(self, rank: int, error: Exception, at_once: bool) -> None:
        """Remove the member ``rank``; calls that wait for it raise ``error``."""
        with self._lock:
            self._left.setdefault(rank, error)
            wires = [wire for ends, wire in self._wires.items() if rank in ends]
            boxes = [box for other, box in self._mailboxes.items() if other != rank]
        for wire in wires:
            wire.end(at_once)
        for box in boxes:
            box.fail(rank, error)


class Sent(Request):
    """The request of a sent frame. The wire has copied it, so its memory may be reused at once."""

    def __init__(self) -> None:
        self.done = True

    def wait(self, on_piece: OnPiece | None = None) -> None:
        pass


class Received(Request):
    """The request to receive a frame into ``into`` over ``link``."""

    def __init__(self, link: QueueLink, call: Call, into: memoryview) -> None:
        self.link, self.call, self.into = link, call, into
        self.done = False

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self.link.receive(self)
            if on_piece is not None:
                on_piece(self.into.nbytes)


class QueueLink(Link):
    """A link over the two wires between this rank and ``peer``."""

    def __init__(self, owner: QueueCommunicator, peer: int) -> None:
        self.peer = peer
        self._owner = owner
        self._name = owner.membership.describe(peer)
        self._outward = owner.hub.wire(owner.rank, peer)
        self._inward = owner.hub.wire(peer, owner.rank)
        self._posted: deque[Received] = deque()

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> Request:
        # Both ends post the frames of a link in the same order, so no tag is needed.
        if not self._outward.put(call.packed, data):
            raise self._gone()
        return Sent()

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> Request:
        received = Received(self, call, into)
        self._posted.append(received)
        return received

    def receive(self, awaited: Received) -> None:
        """Receive the posted frames, in order, up to ``awaited``."""
        try:
            while not awaited.done:
                first = self._posted[0]
                self._receive(first.call, first.into)
                first.done = True
                self._posted.popleft()
        finally:
            if not awaited.done:
                self._posted.clear()

    def _receive(self, call: Call, into: memoryview) -> None:
        call.waiting_for = self.peer
        frame = self._inward.take(call.deadline)
        if frame is None:
            late = waited_for(call, self.peer, self._name, "to send data")
            raise self._gone() if self._inward.ended else late
        call.waiting_for = None
        packed, data = frame
        if packed != call.packed or len(data) != into.nbytes:
            header = CallHeader.unpack(packed)
            raise wrong_frame(call, into.nbytes, self.peer, self._name, header, len(data))
        into[:] = data

    def _gone(self) -> Exception:
        self._owner.check_open()
        return PeerLostError(f"{self._name} is gone", self.peer)


class QueueCommunicator(LinkCommunicator):
    """A transport between threads of one process."""

    tuned_as = "queues"  # has no tuning, so the default algorithms apply

    def __init__(self, membership: Membership) -> None:
        self.hub = membership.store.in_process("queues", Hub)
        mailbox = self.hub.mailbox(membership, membership.rank)
        super().__init__(membership, mailbox=mailbox)
        self._links: dict[int, QueueLink] = {}

    def link(self, peer: int, call: Call) -> QueueLink:
        if peer not in self._links:
            self._links[peer] = QueueLink(self, peer)
        return self._links[peer]

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        box = self.hub.mailbox(self.membership, dst)
        try:
            box.deliver(self.rank, call.header, data, call.deadline)
        except CommunicatorAbortedError:
            self.check_open()
            name = self.membership.describe(dst)
            raise PeerLostError(f"send to {name}: it is gone", dst) from None

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._leave(at_once=True)

    def close(self) -> None:
        super().close()
        self._leave(at_once=False)

    def _leave(self, at_once: bool) -> None:
        name = self.membership.describe(self.rank)
        self.hub.leave(self.rank, PeerLostError(f"{name} is gone", self.rank), at_once)


def main() -> None:
    """Average over the new transport."""
    x = np.full(3, float(dist.get_rank()))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"over {dist.get_backend()}, the average of the ranks is {x}")


if __name__ == "__main__":
    dist.Backend.register_backend("queues", QueueCommunicator, devices="cpu")
    run_ranks(main, 4, backend="queues")
