"""A link over one TCP connection.

Waiting happens in the kernel, which lets other ranks have the core. A receiver looks for a moment,
then waits in ``recv`` itself (in slices, by ``SO_RCVTIMEO``), the cheapest way to be woken: a small
frame costs one system call at each end. A sender whose socket is full waits in ``poll``, which
also tells it when the peer has hung up without reading.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial

from transport.call import Call
from transport.condition import has, let_go
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    PeerLostError,
)
from transport.link import Link, OnPiece, Outbox, QueuedLink, wrong_frame
from transport.net.reach import is_out_of_reach
from transport.tcp.far import Distance, is_on_this_machine
from transport.tcp.frame import (
    ALL,
    NOW,
    SMALL_BYTES,
    STAGING_BYTES,
    STEP_BYTES,
    Incoming,
    Outgoing,
    PassedOn,
    StripedOutgoing,
    WrongFrame,
)
from transport.tcp.outbox import TcpOutbox
from transport.tcp.stripes import STRIPED_BYTES
from transport.tcp.waiting import await_readable, poll
from transport.waiting import LookOut

_SLICE_SECONDS = 1
_STALLED_MILLISECONDS = 2
# Between processes of one machine the kernel lets megabytes pile up, which fall out of the caches
# before the receiver copies them; this is a third faster. Elsewhere the kernel knows better.
_LOCAL_SEND_BUFFER = 512 << 10
# Of a frame that is passed on: what was received is still in cache when it is sent.
_RELAYED_BYTES = 512 << 10
_RESET = struct.pack("@ii", 1, 0)  # as SO_LINGER: close at once, without what is still queued
# Says on a further connection that the end which made it has it.
_READY = b"\x01"
_HALF_A_FRAME = "an earlier call stopped in the middle of a frame"


class TcpLink(QueuedLink):
    """A link over ``sock``, a connected stream socket, which belongs to the link from now on.

    ``name`` is what messages call the peer. Several threads may call ``send``; they take turns.
    ``on_stall`` is called when the peer takes nothing of what ``send`` has for it, which may be
    because it waits for this rank to take something. ``connections`` is how many it has if the peer
    is far; the others are for its owner to ``add``.
    """

    # No kernel has less room for a connection than twice that, at both ends together.
    eager_bytes = SMALL_BYTES

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        name: str,
        on_stall: Callable[[], None] | None = None,
        connections: int = 1,
    ) -> None:
        self.peer = peer
        self.name = name
        self._on_stall = on_stall
        self.first = sock
        # Held while a thread uses the socket: its descriptor must not be closed, and given to
        # another file, under a system call.
        self._use = threading.RLock()
        self._ended: str | None = None
        self._peer_left = False
        self._closing = False
        self._held = False
        # Connections beside the first, in the same order at both ends. The peer may have fewer yet.
        self._more: tuple[socket.socket, ...] = ()
        self._usable = 0
        self._look_out = LookOut(pauses=True, main_only=True)
        self.distance: Distance = Distance(sock, name, connections)
        self.staging = memoryview(bytearray(STAGING_BYTES))
        sock.settimeout(None)
        slice_ = struct.pack("@ll", _SLICE_SECONDS, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
        if is_on_this_machine(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BUFFER)

    def send(self, call: Call, data: memoryview) -> None:
        try:
            self.enter(call)
            outgoing = self.departure(call, data)
            try:
                self._send(call, outgoing)
            except BaseException:
                self.give_up(outgoing, None)
                raise
        finally:
            self.leave()

    def recv_into(self, call: Call, into: memoryview) -> None:
        try:
            self.enter(call)
            incoming = self.arrival(call, into)
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
        try:
            self.enter(call)
            if source is not self:
                source.enter(call)
            self._exchange(call, data, source, into, on_piece)
        finally:
            if source is not self:
                source.leave()
            self.leave()

    def relay(self, call: Call, source: Link, into: memoryview) -> None:
        assert isinstance(source, TcpLink)
        try:
            self.enter(call)
            source.enter(call)
            self._relay(call, source, into)
        finally:
            source.leave()
            self.leave()

    @property
    def window(self) -> int:
        return self.distance.window

    @property
    def connections(self) -> int:
        """How many connections there are by now."""
        return 1 + len(self._more)

    def add(self, sock: socket.socket, dialled: bool) -> None:
        """Take another connection to the peer, which has it already if this end ``dialled``, and
        else may only be about to learn that it was accepted. It belongs to the link from now on.
        Any thread.
        """
        sock.settimeout(None)
        self._more = (*self._more, sock)
        if dialled:
            self._usable = len(self._more)
            with contextlib.suppress(OSError):  # gone already: the next call finds out
                sock.send(_READY)
        if self._ended is not None:
            self._end(self._ended)

    def outbox(self, call: Call, former: Outbox | None = None) -> TcpOutbox:
        assert former is None or isinstance(former, TcpOutbox)
        return TcpOutbox(call, former)

    def abort(self, reason: str = "the link was aborted") -> None:
        """Wake whoever is blocked on this link, here and on the peer.

        Those here raise ``CommunicatorAbortedError`` with ``reason``, as do all later calls.
        """
        let_go(self._use)  # which an interrupted call, that may be the reason, may have kept
        self._reset(reason)

    def _reset(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # gone already
            # Close by a reset. An orderly end would queue up behind data that was sent, and never
            # get past a peer that is blocked in sending and does not read.
            for sock in (self.first, *self._more):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._end(reason)

    def close(self) -> None:
        """End the link; what was sent before still arrives. Idempotent.

        A thread that is in a call raises ``CommunicatorAbortedError``, and closes the socket.
        """
        self._end("the link was closed")

    def hold(self) -> socket.socket:
        """Return the socket for somebody else to read from; it stays open until ``let_go``."""
        self._held = True
        return self.first

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
        for sock in (self.first, *self._more):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._closing = True
        self._close_if_unused()

    # For this room: a call holds the link from ``enter`` to ``leave``.

    def departure(self, call: Call, data: memoryview) -> Outgoing:
        """Return a frame that is to be pushed here."""
        over = self._connections_for(data.nbytes)
        if len(over) == 1:
            return Outgoing(call, data)
        outgoing = StripedOutgoing(call, data, over)
        outgoing.there = data.nbytes
        return outgoing

    def _passage(self, call: Call, data: memoryview) -> PassedOn:
        """Return a frame that is to be pushed here while its payload comes."""
        over = self._connections_for(data.nbytes)
        return PassedOn(call, data) if len(over) == 1 else StripedOutgoing(call, data, over)

    def _connections_for(self, nbytes: int) -> tuple[socket.socket, ...]:
        """Return the connections for a payload that leaves: those that the peer has as well."""
        if not self._more or nbytes < STRIPED_BYTES:
            return (self.first,)
        with contextlib.suppress(OSError):  # one that is gone is noticed where it is used
            while self._usable < len(self._more) and self._more[self._usable].recv(1, NOW):
                self._usable += 1
        return (self.first, *self._more[: self._usable])

    def arrival(self, call: Call, into: memoryview) -> Incoming:
        """Return a frame that is to be pulled from here."""
        return Incoming(call, into, self.staging, partial(self._connections, call))

    def _connections(self, call: Call, count: int) -> tuple[socket.socket, ...]:
        """Return the connections over which the peer says that a payload comes."""
        if count > self.connections:
            raise ConnectionAbortedError(
                errno.ECONNABORTED,
                f"it sends a payload over {count} connections of {self.connections}",
            )
        while self._usable < count - 1:  # its word that it has them came before the payload
            sock = self._more[self._usable]
            await_readable(call, sock, self.peer, self.name)
            with contextlib.suppress(BlockingIOError):  # inside TLS, half of it may have come
                if not sock.recv(1, NOW):
                    raise ConnectionResetError(errno.ECONNRESET, "it hung up")
                self._usable += 1
        return (self.first, *self._more[: max(1, count) - 1])

    def enter(self, call: Call) -> None:
        """Take the link for ``call``, waiting for other threads. Raises when it has ended.

        ``leave`` is due even then.
        """
        call.waiting_for = self.peer
        if not self._use.acquire(blocking=False) and not self._use.acquire(
            timeout=call.deadline.remaining()
        ):
            raise CommunicatorTimeoutError(
                f"{call.header}: another thread used the connection to {self.name} for all of"
                f" {call.deadline.seconds:g} s",
                self.peer,
            )
        if self._ended is not None:
            raise self.lost(self._ended)

    def leave(self) -> None:
        """Give the link back, if this thread has it."""
        try:
            self._use.release()
        except RuntimeError:
            return
        if self._closing:
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        # In the middle of a call of this very thread, its end does so.
        if not self._held and not has(self._use) and self._use.acquire(blocking=False):
            for sock in (self.first, *self._more):
                sock.close()
            self._use.release()

    def _exchange(
        self,
        call: Call,
        data: memoryview,
        source: TcpLink,
        into: memoryview,
        on_piece: OnPiece | None,
    ) -> None:
        outgoing = self.departure(call, data)
        incoming = source.arrival(call, into)
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
                    if source is not self:
                        call.waiting_for = source.peer
                    poll(call, {self: outgoing}, {source: incoming}, source)
            if not outgoing.done:
                call.waiting_for = self.peer
                self._send(call, outgoing)
            if not incoming.done:
                source.receive(call, incoming, on_piece)
        except BaseException:
            self.give_up(outgoing, None)
            source.give_up(None, incoming)
            raise

    def _relay(self, call: Call, source: TcpLink, into: memoryview) -> None:
        incoming = source.arrival(call, into)
        outgoing = self._passage(call, into)
        try:
            while not incoming.done:
                moved = source.pull(incoming, NOW, _RELAYED_BYTES)
                outgoing.there = incoming.received
                if outgoing.waits:
                    moved |= self.push(outgoing)
                if not moved:
                    call.waiting_for = source.peer
                    full: dict[TcpLink, Outgoing] = {}
                    if outgoing.waits:
                        full[self] = outgoing
                    poll(call, full, {source: incoming}, source)
            call.waiting_for = self.peer
            self._send(call, outgoing)
        except BaseException:
            self.give_up(outgoing, None)
            source.give_up(None, incoming)
            raise

    def _send(self, call: Call, outgoing: Outgoing) -> None:
        while not outgoing.done:
            if not self.push(outgoing):
                self._await_room(call, outgoing)

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
            if not incoming.striped and call.deadline.at - time.monotonic() > _SLICE_SECONDS:
                self.pull(incoming, flags)
            elif not self.pull(incoming, NOW):
                poll(call, {}, {self: incoming}, self)

    def push(self, outgoing: Outgoing) -> bool:
        """Send what fits; return whether anything did."""
        try:
            outgoing.push(self.first)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.lost(error) from error
        if outgoing.done and isinstance(outgoing, StripedOutgoing):
            self.distance.note_sent(outgoing.there, outgoing.took)
        return True

    def pull(self, incoming: Incoming, flags: int, limit: int = 0) -> bool:
        """Receive once; return whether anything came."""
        try:
            incoming.pull(self.first, flags, limit)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self.lost(error) from error
        except WrongFrame as wrong:
            raise wrong_frame(
                incoming.call, len(incoming.into), self.peer, self.name, wrong.header, wrong.size
            ) from None
        return True

    def _await_room(self, call: Call, outgoing: Outgoing) -> None:
        if self._on_stall is not None:
            poller = select.poll()
            poller.register(self.first, select.POLLOUT)
            if poller.poll(_STALLED_MILLISECONDS):
                return
            self._on_stall()
        poll(call, {self: outgoing}, {}, None)

    def give_up(self, outgoing: Outgoing | None, incoming: Incoming | None) -> None:
        """Take the link out of use if an error leaves it in the middle of a frame."""
        if outgoing is not None and outgoing.begun and not outgoing.done:
            # The peer waits for the rest.
            self._reset(_HALF_A_FRAME)
        elif incoming is not None and incoming.begun and not incoming.done and not self._ended:
            self._ended = _HALF_A_FRAME

    def lost(self, reason: object) -> Exception:
        """Return the error for a connection that ended: ours, where this rank ended it."""
        if self._ended is not None and not self._peer_left:
            return CommunicatorAbortedError(self._ended)
        text = f"the connection to {self.name} was lost: {reason}"
        return PeerLostError(text, self.peer, is_out_of_reach(reason))
