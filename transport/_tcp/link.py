"""Links over TCP connections for the frames of collectives, and the worker that moves the frames.

Threads wait in the kernel, so that other ranks can use the core. A receiver polls for a moment,
then blocks in ``recv`` (in slices, by ``SO_RCVTIMEO``). This is the cheapest wakeup: a small frame
costs one system call at each end. If several links have work, the receiver blocks in ``poll``.
"""

from __future__ import annotations

import errno
import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence

from transport._calls.call import Call
from transport._errors import CommunicatorAbortedError, CommunicatorTimeoutError
from transport._link import Link, OnPiece, Request, wrong_frame
from transport._tcp.connection import HALF_A_FRAME, TcpConnection
from transport._tcp.far import Distance
from transport._tcp.frame import (
    ALL,
    PREFIX_BYTES,
    SMALL_BYTES,
    STEP_BYTES,
    FrameReceive,
    FrameSend,
    Prefix,
    receive,
)
from transport._tcp.stripes import Stripes
from transport._tcp.worker import LinkWorker
from transport._waiting.interrupts import SLICE_SECONDS, look
from transport._waiting.polling import PEER_CLOSED
from transport._waiting.spinning import SpinWait


class TcpLink(TcpConnection, Link):
    """A link over ``sockets``, in the same order at both ends."""

    worker: FrameWorker

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        peer: int,
        name: str,
        worker: FrameWorker | None = None,
    ) -> None:
        super().__init__(sockets, peer, name, FrameWorker() if worker is None else worker)
        self.receives: deque[FrameReceive] = deque()
        self._stripes: Stripes | None = None
        self._spin = SpinWait(pauses=True, main_only=True)
        self.distance: Distance = Distance(self.first, name, len(sockets))
        self.window = self.distance.window
        slice_ = struct.pack("@ll", *divmod(int(SLICE_SECONDS * 1e6), 10**6))
        self.first.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> Request:
        worker = self.worker
        worker.lock.acquire()
        try:
            worker.begin(call)
            request = self.post(call, data, tag)
            if self.leaving:
                worker.leaving[self] = None
            return request
        except Exception:
            worker.withdraw()
            raise
        finally:
            worker.leave()

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> FrameReceive:
        worker = self.worker
        worker.begin(call)
        if self.ended is not None:
            raise self.lost(self.ended)
        incoming = FrameReceive(self, call, into, tag)
        self.receives.append(incoming)
        worker.receiving[self] = None
        return incoming

    def wait(self, request: FrameSend | FrameReceive, on_piece: OnPiece | None = None) -> None:
        self.worker.wait(self, request, on_piece)

    # For the worker, under its lock.

    @property
    def brings_on(self) -> Sequence[socket.socket]:
        """The sockets to read from; none while a frame waits until its receive is posted."""
        if self._is_held():
            return ()
        return (self.first,) if self._stripes is None else self._stripes.left

    def _is_held(self) -> bool:
        return self._target is None and self._end - self._begin >= PREFIX_BYTES

    def receive(self, awaited: FrameReceive, on_piece: OnPiece | None) -> None:
        """Wait for a whole frame, without serving other links."""
        if self._target is None and not awaited.done:
            self._spin.until(self.pull)
        flags, deadline = ALL if on_piece is None else 0, awaited.call.deadline
        while True:
            if on_piece is not None and awaited.received:
                on_piece(awaited.received)
            if awaited.done:
                return
            look()
            self.check_awaited(awaited)
            if self._stripes is None and deadline.at - time.monotonic() > SLICE_SECONDS:
                self.pull(flags, len(awaited.into))
            elif not self.pull():
                self._poll(awaited.call)

    def _poll(self, call: Call) -> None:
        """Wait until bytes arrive; raise past the deadline."""
        poller = select.poll()
        for sock in self.brings_on:
            poller.register(sock, select.POLLIN)
        while not poller.poll(math.ceil(call.deadline.piece() * 1000)):
            if call.deadline.expired:
                text = f"within {call.deadline.seconds:g} s {self.name} sent nothing"
                raise CommunicatorTimeoutError(f"{call.header}: {text}", self.peer)

    def check_awaited(self, awaited: FrameReceive) -> None:
        """Raise HeaderMismatchError if no receive was posted for the next frame."""
        if self._is_held():
            prefix = self._prefix()
            if self._find(prefix) is None:
                raise wrong_frame(
                    awaited.call,
                    awaited.into.nbytes,
                    self.peer,
                    self.name,
                    prefix.header,
                    prefix.size,
                )

    def withdraw(self) -> None:
        super().withdraw()
        if self.receives and (self._target is not None or self._begin < self._end):
            self.ended = self.ended or HALF_A_FRAME
        self.receives.clear()
        self._target = self._stripes = None

    def _on_sent(self, outgoing: FrameSend) -> None:
        if not self.leaving:
            self.worker.leaving.pop(self, None)
        if self.window:
            self.distance.note_sent(outgoing.nbytes, outgoing.took)

    def _ahead(self) -> int:
        size = len(self.receives[0].into)
        return PREFIX_BYTES + size if size <= SMALL_BYTES else PREFIX_BYTES

    def _begin_frame(self) -> bool:
        begin, incoming = self._begin, self.receives[0]
        if bytes(self._staging[begin : begin + PREFIX_BYTES]) != incoming.prefix:
            prefix = self._prefix()
            found = self._find(prefix)
            if found is None:
                if prefix.packed != incoming.call.packed:
                    self.check_awaited(incoming)
                return False
            if found is not incoming:
                self.receives.remove(found)
                self.receives.appendleft(found)
                incoming = found
            size = incoming.into.nbytes
            if prefix.size != size:
                raise wrong_frame(
                    incoming.call, size, self.peer, self.name, prefix.header, prefix.size
                )
            if prefix.connections != 1:
                self._stripes = Stripes(incoming.into, self._stripe_over(prefix.connections))
        self._begin = begin + PREFIX_BYTES
        if self._stripes is None:
            incoming.received = self._use_staged(incoming.into)
            if incoming.received == len(incoming.into):
                self._complete(incoming)
                return True
        self._target = incoming
        return True

    def _find(self, prefix: Prefix) -> FrameReceive | None:
        """Return the posted receive of a frame."""
        for incoming in self.receives:
            if incoming.tag == prefix.tag and incoming.call.packed == prefix.packed:
                return incoming
        return None

    def _fill(self, target: FrameReceive, flags: int, limit: int) -> bool:
        if self._stripes is not None:
            if not self._stripes.move(receive, limit or STEP_BYTES):
                return False
            target.received = self._stripes.contiguous
        else:
            target.received += receive(self.first, target.into[target.received :], flags, limit)
        if target.received == len(target.into):
            self._complete(target)
        return True

    def _complete(self, incoming: FrameReceive) -> None:
        incoming.done = True
        self._target = self._stripes = None
        self.receives.popleft()
        if not self.receives:
            del self.worker.receiving[self]

    def _stripe_over(self, count: int) -> Sequence[socket.socket]:
        """Return the ``count`` sockets over which the peer sends a payload."""
        if count != len(self.sockets):
            raise ConnectionAbortedError(
                errno.ECONNABORTED,
                f"it sends a payload over {count} connections, but the link has"
                f" {len(self.sockets)}",
            )
        return self.sockets


class FrameWorker(LinkWorker):
    """Moves the frames that the calls of one communicator post, one call at a time.

    ``leaving`` are the links with frames to send, ``receiving`` those with posted receives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leaving: dict[TcpLink, None] = {}
        self.receiving: dict[TcpLink, None] = {}
        self._call: Call | None = None

    def begin(self, call: Call) -> None:
        """Withdraw the frames of an interrupted call before ``call``. The caller holds the lock."""
        if call is not self._call:
            overlaps = call.rest is not None and call.rest.overlaps
            if (self.leaving or self.receiving) and not overlaps:
                self.withdraw()
            self._call = call

    def withdraw(self) -> None:
        """Drop all frames. A link with a partly moved frame ends. The caller holds the lock."""
        for link in {**self.leaving, **self.receiving}:
            link.withdraw()
        self.leaving.clear()
        self.receiving.clear()

    def wait(
        self, link: TcpLink, request: FrameSend | FrameReceive, on_piece: OnPiece | None
    ) -> None:
        """Make progress on all links until ``request`` of ``link`` is done."""
        request.call.waiting_for = link.peer
        self.lock.acquire()
        try:
            self._wait(link, request, on_piece)
        finally:
            if not request.done:
                self.withdraw()
            self.leave()

    def _wait(
        self, link: TcpLink, request: FrameSend | FrameReceive, on_piece: OnPiece | None
    ) -> None:
        awaited = request if isinstance(request, FrameReceive) else None
        if not request.done and link not in (self.leaving if awaited is None else self.receiving):
            raise CommunicatorAbortedError("a call that overlaps with this one has failed")
        ready: dict[TcpLink, None] | None = None
        while True:
            if awaited is not None and not self.leaving and self._others_are_small(link):
                link.receive(awaited, on_piece)
                return
            if ready is None:
                ready = {**self.leaving, **self.receiving}
            moved = self._serve(ready)
            if awaited is not None:
                if on_piece is not None and awaited.received:
                    on_piece(awaited.received)
                if not awaited.done:
                    link.check_awaited(awaited)
            if request.done:
                return
            ready = moved or self._poll(request.call, link, awaited)

    def _others_are_small(self, link: TcpLink) -> bool:
        """True if the kernel's buffers can hold the next frames of all other links."""
        return len(self.receiving) == 1 or all(
            other is link or other.receives[0].into.nbytes <= SMALL_BYTES
            for other in self.receiving
        )

    def _serve(self, ready: dict[TcpLink, None]) -> dict[TcpLink, None]:
        """Move a step of each link's first frames, both ways; return the links that moved."""
        moved: dict[TcpLink, None] = {}
        for link in ready:
            if link.leaving and link.push():
                moved[link] = None
            if link.receives and link.pull():
                moved[link] = None
        return moved

    def _poll(
        self, call: Call, awaited_link: TcpLink, awaited: FrameReceive | None
    ) -> dict[TcpLink, None]:
        """Wait until links can send or receive more; return those links.

        Raises past the deadline, naming the awaited peers, and if a peer has hung up before it
        received everything.
        """
        wanted: dict[int, int] = {}
        links: dict[int, TcpLink] = {}
        for link in self.leaving:
            for sock in link.leaving[0].waits_on:
                # If this rank also receives, reading finds the peer's end behind its last bytes.
                hangs_up = 0 if link.receives else PEER_CLOSED
                wanted[sock.fileno()] = select.POLLOUT | hangs_up
                links[sock.fileno()] = link
        for link in self.receiving:
            for sock in link.brings_on:
                wanted[sock.fileno()] = wanted.get(sock.fileno(), 0) | select.POLLIN
                links[sock.fileno()] = link
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        while True:
            expired = call.deadline.expired
            ready = poller.poll(math.ceil(call.deadline.piece() * 1000))
            if ready or expired:
                break
        for descriptor, events in ready:
            link = links[descriptor]
            if not link.receives and not events & select.POLLOUT:
                raise link.lost("it hung up before it had received everything")
        if not ready:
            parts = [f"{link.name} read nothing" for link in self.leaving]
            parts += [f"{awaited_link.name} sent nothing"] if awaited is not None else []
            raise CommunicatorTimeoutError(
                f"{call.header}: within {call.deadline.seconds:g} s {' and '.join(parts)}",
                awaited_link.peer,
            )
        return {links[descriptor]: None for descriptor, _ in ready}
