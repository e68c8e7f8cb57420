"""A link over one TCP connection.

Waiting happens in the kernel, which lets other ranks have the core. A receiver looks for a moment,
then waits in ``recv`` itself (in slices, by ``SO_RCVTIMEO``), the cheapest way to be woken: a small
frame costs one system call at each end. A sender whose socket is full waits in ``poll``, which
also tells it when the peer has hung up without reading.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from transport.call import Call
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    PeerLostError,
)
from transport.link import Link, OnPiece, Pace, PacedLink, wrong_frame
from transport.tcp.frame import (
    ALL,
    NOW,
    SMALL_BYTES,
    STAGING_BYTES,
    STEP_BYTES,
    Incoming,
    Outgoing,
    WrongFrame,
)
from transport.tcp.look_out import LookOut
from transport.tcp.outbox import TcpOutbox
from transport.tcp.pace import pace_of

_SLICE_SECONDS = 1
_STALLED_MILLISECONDS = 2
# Between processes of one machine the kernel lets megabytes pile up, which fall out of the caches
# before the receiver copies them; this is a third faster. Elsewhere the kernel knows better.
_LOCAL_SEND_BUFFER = 512 << 10
_RESET = struct.pack("@ii", 1, 0)  # as SO_LINGER: close at once, without what is still queued
_HALF_A_FRAME = "an earlier call stopped in the middle of a frame"


class TcpLink(PacedLink):
    """A link over ``sock``, a connected stream socket, which belongs to the link from now on.

    ``name`` is what messages call the peer. Several threads may call ``send``; they take turns.
    ``on_stall`` is called when the peer takes nothing of what ``send`` has for it, which may be
    because it waits for this rank to take something.
    """

    # No kernel has less room for a connection than twice that, at both ends together.
    eager_bytes = SMALL_BYTES

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        name: str,
        on_stall: Callable[[], None] | None = None,
    ) -> None:
        self.peer = peer
        self._name = name
        self._on_stall = on_stall
        self._sock = sock
        # Held while a thread uses the socket: its descriptor must not be closed, and given to
        # another file, under a system call.
        self._use = threading.Lock()
        self._ended: str | None = None
        self._peer_left = False
        self._closing = False
        self._held = False
        self._look_out = LookOut()
        self.staging = memoryview(bytearray(STAGING_BYTES))
        sock.settimeout(None)
        slice_ = struct.pack("@ll", _SLICE_SECONDS, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
        self._on_this_machine = _on_this_machine(sock)
        if self._on_this_machine:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BUFFER)

    def send(self, call: Call, data: memoryview) -> None:
        self.enter(call)
        try:
            outgoing = Outgoing(call, data)
            try:
                self._send(call, outgoing)
            except BaseException:
                self.give_up(outgoing, None)
                raise
        finally:
            self.leave()

    def recv_into(self, call: Call, into: memoryview) -> None:
        self.enter(call)
        try:
            incoming = Incoming(call, into, self.staging)
            try:
                self.receive(call, incoming, None)
            except BaseException:
                self.give_up(None, incoming)
                raise
        finally:
            self.leave()

    def exchange(
        self,
        call: Call,
        data: memoryview,
        source: Link,
        into: memoryview,
        on_piece: OnPiece | None = None,
    ) -> None:
        assert isinstance(source, TcpLink)
        self.enter(call)
        try:
            if source is self:
                self._exchange(call, data, self, into, on_piece)
            else:
                source.enter(call)
                try:
                    self._exchange(call, data, source, into, on_piece)
                finally:
                    source.leave()
        finally:
            self.leave()

    def pace(self) -> Pace:
        """See ``PacedLink``. On one machine nothing is far enough to matter."""
        return Pace(0.0, 0.0) if self._on_this_machine else pace_of(self._sock)

    def outbox(self, call: Call) -> TcpOutbox:
        return TcpOutbox(call)

    def abort(self, reason: str = "the link was aborted") -> None:
        """Wake whoever is blocked on this link, here and on the peer.

        Those here raise ``CommunicatorAbortedError`` with ``reason``, as do all later calls.
        """
        with contextlib.suppress(OSError):  # gone already
            # Close by a reset. An orderly end would queue up behind data that was sent, and never
            # get past a peer that is blocked in sending and does not read.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._end(reason)

    def close(self) -> None:
        """End the link; what was sent before still arrives. Idempotent.

        A thread that is in a call raises ``CommunicatorAbortedError``, and closes the socket.
        """
        self._end("the link was closed")

    def hold(self) -> socket.socket:
        """Return the socket for somebody else to read from; it stays open until ``let_go``."""
        self._held = True
        return self._sock

    def let_go(self, reason: str) -> None:
        """End what ``hold`` began, and the link, because the peer has left for ``reason``.

        Later calls raise ``PeerLostError``.
        """
        self._peer_left = self._ended is None
        self._held = False
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        # Wakes those who are in a system call; only then may the descriptor be closed.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._closing = True
        self._close_if_unused()

    # For this room: a call holds the link from ``enter`` to ``leave``.

    def fileno(self) -> int:
        """Return the connection's descriptor, -1 when it is closed."""
        return self._sock.fileno()

    def enter(self, call: Call) -> None:
        """Take the link for ``call``, waiting for other threads. Raises when it has ended."""
        call.waiting_for = self.peer
        if not self._use.acquire(blocking=False) and not self._use.acquire(
            timeout=call.deadline.remaining()
        ):
            raise CommunicatorTimeoutError(
                f"{call.header}: another thread used the connection to {self._name} for all of"
                f" {call.deadline.seconds:g} s",
                self.peer,
            )
        if self._ended is not None:
            self.leave()
            raise self.lost(self._ended)

    def leave(self) -> None:
        """Give the link back."""
        self._use.release()
        if self._closing:
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._held and self._use.acquire(blocking=False):
            self._sock.close()
            self._use.release()

    def _exchange(
        self,
        call: Call,
        data: memoryview,
        source: TcpLink,
        into: memoryview,
        on_piece: OnPiece | None,
    ) -> None:
        outgoing = Outgoing(call, data)
        incoming = Incoming(call, into, source.staging)
        try:
            while True:
                moved = self.push(outgoing)
                if outgoing.done:
                    break
                moved |= source.pull(incoming, NOW, STEP_BYTES)
                if on_piece is not None and incoming.received:
                    on_piece(incoming.received)
                if incoming.done:
                    break
                if not moved:
                    self._await_either(call, source)
            if not outgoing.done:
                call.waiting_for = self.peer
                self._send(call, outgoing)
            if not incoming.done:
                source.receive(call, incoming, on_piece)
        except BaseException:
            self.give_up(outgoing, None)
            source.give_up(None, incoming)
            raise

    def _send(self, call: Call, outgoing: Outgoing) -> None:
        while not outgoing.done:
            if not self.push(outgoing):
                self._await_room(call)

    def receive(self, call: Call, incoming: Incoming, on_piece: OnPiece | None) -> None:
        """Wait for all of a frame."""
        flags = ALL if on_piece is None else 0
        if not incoming.begun:
            self._look_out.until(lambda: self.pull(incoming, NOW))
        while True:
            if on_piece is not None and incoming.received:
                on_piece(incoming.received)
            if incoming.done:
                return
            if call.deadline.at - time.monotonic() > _SLICE_SECONDS:
                self.pull(incoming, flags)
            elif not self.pull(incoming, NOW):
                self.poll(call, {self: select.POLLIN})

    def push(self, outgoing: Outgoing) -> bool:
        """Send what fits; return whether anything did."""
        try:
            outgoing.push(self._sock)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.lost(error) from error
        return True

    def pull(self, incoming: Incoming, flags: int, limit: int = 0) -> bool:
        """Receive once; return whether anything came."""
        try:
            incoming.pull(self._sock, flags, limit)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.lost(error) from error
        except WrongFrame as wrong:
            raise wrong_frame(
                incoming.call, len(incoming.into), self.peer, self._name, wrong.header, wrong.size
            ) from None
        return True

    def _await_room(self, call: Call) -> None:
        if self._on_stall is not None:
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT)
            if poller.poll(_STALLED_MILLISECONDS):
                return
            self._on_stall()
        for _, events in self.poll(call, {self: select.POLLOUT | select.POLLRDHUP}):
            if not events & select.POLLOUT:
                raise self.lost("it hung up before it had received everything")

    def _await_either(self, call: Call, source: TcpLink) -> None:
        """Wait until this peer takes data or ``source`` has some."""
        if source is self:
            # If it hangs up, reading finds out, behind what it has still sent.
            self.poll(call, {self: select.POLLIN | select.POLLOUT})
            return
        call.waiting_for = source.peer
        wanted = {self: select.POLLOUT | select.POLLRDHUP, source: select.POLLIN}
        for descriptor, events in self.poll(call, wanted):
            if descriptor == self._sock.fileno() and not events & select.POLLOUT:
                raise self.lost("it hung up before it had received everything")

    @staticmethod
    def poll(call: Call, wanted: dict[TcpLink, int]) -> list[tuple[int, int]]:
        """Wait for any of the events; return those that came. Raises past the deadline."""
        poller = select.poll()
        for link, events in wanted.items():
            poller.register(link._sock, events)
        while True:
            expired = call.deadline.expired
            ready = poller.poll(math.ceil(call.deadline.piece() * 1000))
            if ready:
                return ready
            if expired:
                break
        parts = [
            f"{link._name} {what} nothing"
            for link, events in wanted.items()
            for flag, what in ((select.POLLIN, "sent"), (select.POLLOUT, "took"))
            if events & flag
        ]
        raise CommunicatorTimeoutError(
            f"{call.header}: within {call.deadline.seconds:g} s {' and '.join(parts)}",
            next(reversed(wanted)).peer,
        )

    def give_up(self, outgoing: Outgoing | None, incoming: Incoming | None) -> None:
        """Take the link out of use if an error leaves it in the middle of a frame."""
        if outgoing is not None and outgoing.begun and not outgoing.done:
            # The peer waits for the rest.
            self.abort(_HALF_A_FRAME)
        elif incoming is not None and incoming.begun and not incoming.done and not self._ended:
            self._ended = _HALF_A_FRAME

    def lost(self, reason: object) -> Exception:
        """Return the error for a connection that ended: ours, where this rank ended it."""
        if self._ended is not None and not self._peer_left:
            return CommunicatorAbortedError(self._ended)
        return PeerLostError(f"the connection to {self._name} was lost: {reason}", self.peer)


def _on_this_machine(sock: socket.socket) -> bool:
    try:
        return sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # the peer has hung up already; the first call finds out
        return False
