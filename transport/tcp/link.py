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
from collections.abc import Callable, Sized

from transport.call import Call
from transport.condition import has, let_go
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    PeerLostError,
)
from transport.link import UNKNOWN, Link, OnPiece, Outbox, Pace, PacedLink, wrong_frame
from transport.net.reach import is_out_of_reach
from transport.tcp.deal import MOST_CONNECTIONS, STRIPED_BYTES
from transport.tcp.frame import (
    ALL,
    ALONE,
    NOW,
    SMALL_BYTES,
    STAGING_BYTES,
    STEP_BYTES,
    DealtOutgoing,
    Incoming,
    Outgoing,
    PassedOn,
    Terms,
    WrongFrame,
)
from transport.tcp.outbox import TcpOutbox
from transport.tcp.pace import Advice, make_room, pace_of
from transport.tcp.waiting import poll
from transport.tcp.width import Width
from transport.waiting import LookOut

_SLICE_SECONDS = 1
_STALLED_MILLISECONDS = 2
# Between processes of one machine the kernel lets megabytes pile up, which fall out of the caches
# before the receiver copies them; this is a third faster. Elsewhere the kernel knows better.
_LOCAL_SEND_BUFFER = 512 << 10
# Of a frame that is passed on: what was received is still in cache when it is sent.
_RELAYED_BYTES = 512 << 10
_RESET = struct.pack("@ii", 1, 0)  # as SO_LINGER: close at once, without what is still queued
_HALF_A_FRAME = "an earlier call stopped in the middle of a frame"


class TcpLink(PacedLink):
    """A link over ``sock``, a connected stream socket, which belongs to the link from now on.

    ``name`` is what messages call the peer. Several threads may call ``send``; they take turns.
    ``on_stall`` is called when the peer takes nothing of what ``send`` has for it, which may be
    because it waits for this rank to take something. ``on_widen`` is asked for so many connections
    if it is for this end to make them. ``advice`` tells the user what would make it faster.
    ``links`` are those of its communicator.
    """

    # No kernel has less room for a connection than twice that, at both ends together.
    eager_bytes = SMALL_BYTES

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        name: str,
        on_stall: Callable[[], None] | None = None,
        on_widen: Callable[[TcpLink, int], None] | None = None,
        advice: Advice | None = None,
        links: Sized = (),
    ) -> None:
        self.peer = peer
        self.name = name
        self._on_stall = on_stall
        self._on_widen = on_widen
        self.first = sock
        # Held while a thread uses the socket: its descriptor must not be closed, and given to
        # another file, under a system call.
        self._use = threading.RLock()
        self._ended: str | None = None
        self._peer_left = False
        self._closing = False
        self._held = False
        # Connections beside the first, in the same order at both ends. The peer may know of fewer.
        self._more: tuple[socket.socket, ...] = ()
        self._usable = 0
        self._look_out = LookOut(pauses=True, main_only=True)
        self._width = Width(name, advice or Advice(), links)
        self.staging = memoryview(bytearray(STAGING_BYTES))
        sock.settimeout(None)
        slice_ = struct.pack("@ll", _SLICE_SECONDS, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
        self._on_this_machine: bool = _on_this_machine(sock)
        if self._on_this_machine:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BUFFER)
        else:
            make_room(sock)

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

    def pace(self) -> Pace:
        """See ``PacedLink``. On one machine nothing is far enough to matter."""
        if self._on_this_machine:
            return UNKNOWN
        return pace_of((self.first, *self._more))

    @property
    def connections(self) -> int:
        """How many connections there are by now."""
        return 1 + len(self._more)

    def add(self, sock: socket.socket, known: bool) -> None:
        """Take another connection to the peer, which has it already (``known``), or may only be
        about to learn that it was accepted. It belongs to the link from now on. Any thread.
        """
        sock.settimeout(None)
        make_room(sock)
        self._more = (*self._more, sock)
        if known:
            self._usable = len(self._more)
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
        terms = self._terms(data.nbytes)
        if not terms.shares:
            return Outgoing(call, data, terms)
        outgoing = DealtOutgoing(call, data, terms, self._dealt_to(terms))
        outgoing.there = data.nbytes
        return outgoing

    def _passage(self, call: Call, data: memoryview) -> PassedOn:
        """Return a frame that is to be pushed here while its payload comes."""
        terms = self._terms(data.nbytes)
        if not terms.shares:
            return PassedOn(call, data, terms)
        return DealtOutgoing(call, data, terms, self._dealt_to(terms))

    def _terms(self, nbytes: int) -> Terms:
        """Return what the prefix of a frame with so many bytes says of the connections."""
        if self._on_this_machine and not self._more:
            return ALONE
        shares = b""
        if nbytes >= STRIPED_BYTES:
            shares = self._width.shares((self.first, *self._more[: self._usable]), nbytes)
            self._ask_for(self._width.wanted)
        return Terms(1 + len(self._more), self._width.wanted, shares)

    def arrival(self, call: Call, into: memoryview) -> Incoming:
        """Return a frame that is to be pulled from here."""
        return Incoming(call, into, self.staging, self._connections)

    def _connections(self, terms: Terms) -> tuple[socket.socket, ...]:
        """Be told what the peer knows and wants; return the connections that have shares."""
        if terms.have > 1:
            self._usable = max(self._usable, min(terms.have - 1, len(self._more)))
        self._ask_for(min(terms.wants, MOST_CONNECTIONS))
        if len(terms.shares) > self.connections:
            raise ConnectionAbortedError(
                errno.ECONNABORTED,
                f"it deals a payload to {len(terms.shares)} connections of {self.connections}",
            )
        return self._dealt_to(terms) if terms.shares else ()

    def _dealt_to(self, terms: Terms) -> tuple[socket.socket, ...]:
        return (self.first, *self._more[: len(terms.shares) - 1])

    def _ask_for(self, connections: int) -> None:
        if connections > self.connections and self._on_widen is not None:
            self._on_widen(self, connections)

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
            if not incoming.dealt and call.deadline.at - time.monotonic() > _SLICE_SECONDS:
                self.pull(incoming, flags)
            elif not self.pull(incoming, NOW):
                poll(call, {}, {self: incoming}, self)

    def push(self, outgoing: Outgoing) -> bool:
        """Send what fits; return whether anything did."""
        try:
            outgoing.push(self.first)
        except BlockingIOError:
            self._width.note_full(self.first, self.connections)
            return False
        except OSError as error:
            raise self.lost(error) from error
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


def _on_this_machine(sock: socket.socket) -> bool:
    try:
        return sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # the peer has hung up already; the first call finds out
        return False
