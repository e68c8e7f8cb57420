"""A connection to one member: its sockets, the outgoing frames, and the incoming one."""

from __future__ import annotations

import contextlib
import socket
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from transport._calls.call import Call
from transport._errors import CommunicatorAbortedError, PeerLostError
from transport._link import OnPiece, Request
from transport._net.reach import is_out_of_reach
from transport._tcp.far import is_on_this_machine
from transport._tcp.frame import (
    ALL,
    NOW,
    PREFIX_BYTES,
    SENT,
    SMALL_BYTES,
    STAGING_BYTES,
    STEP_BYTES,
    FrameReceive,
    FrameSend,
    Prefix,
    pack_prefix,
    parse_prefix,
    receive,
)
from transport._tcp.stripes import STRIPED_BYTES
from transport._tcp.worker import LinkWorker

# Between processes of one machine the kernel would queue megabytes, which leave the caches before
# the receiver copies them. For remote peers, the kernel chooses the size.
_LOCAL_SEND_BUFFER = 512 << 10
_RESET = struct.pack("@ii", 1, 0)  # as SO_LINGER: close at once, and discard queued data
HALF_A_FRAME = "an earlier call stopped in the middle of a frame"


class TcpConnection(ABC):
    """Frames to and from ``peer`` over ``sockets``, which the connection owns.

    ``name`` is the peer's name in messages. Bytes move under ``worker.lock``. The subclasses find
    the memory for a received frame: a posted receive, or the mailbox.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], peer: int, name: str, worker: LinkWorker
    ) -> None:
        self.peer = peer
        self.name = name
        self.sockets: Sequence[socket.socket] = tuple(sockets)
        self.first: socket.socket = self.sockets[0]
        """The socket that carries the prefixes."""
        self.worker = worker
        self.leaving: deque[FrameSend] = deque()
        self.ended: str | None = None
        """Why the connection has ended."""
        self._peer_left = False
        # Bytes that were read and not used yet, and the frame whose payload is arriving.
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._begin = self._end = 0
        self._target: Any = None
        for sock in self.sockets:
            sock.settimeout(None)
        if is_on_this_machine(self.first):
            self.first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BUFFER)

    @abstractmethod
    def wait(self, request: FrameSend | FrameReceive, on_piece: OnPiece | None = None) -> None:
        """Make progress until ``request``, which was posted here, is done."""

    # Moving bytes, under the worker's lock.

    def check_open(self) -> None:
        """Raise if the connection has ended."""
        if self.ended is not None:
            raise self.lost(self.ended)

    def post(self, call: Call, data: memoryview, tag: int = 0) -> Request:
        """Queue a frame behind the outgoing ones; send as much as fits at once."""
        if self.ended is not None:
            raise self.lost(self.ended)
        size, sent = data.nbytes, 0
        if size <= SMALL_BYTES and not self.leaving:
            try:
                sent = self.first.send(pack_prefix(call, size, tag) + data, NOW)
            except BlockingIOError:
                pass
            except OSError as error:
                raise self.lost(error) from error
            if sent == PREFIX_BYTES + size:
                return SENT
        sockets = self.sockets if size >= STRIPED_BYTES else self.sockets[:1]
        outgoing = FrameSend(self, call, data, tag, sockets)
        if sent:
            outgoing.skip(sent)
        self.leaving.append(outgoing)
        if self.leaving[0] is outgoing:
            while self.push() and self.leaving:
                pass
        return outgoing

    def push(self) -> bool:
        """Send as much as fits, up to one step; return whether bytes were sent."""
        queue, moved = self.leaving, False
        while queue:
            outgoing = queue[0]
            try:
                outgoing.push()
            except BlockingIOError:
                return moved
            except OSError as error:
                raise self.lost(error) from error
            moved = True
            if not outgoing.done:
                break
            queue.popleft()
            self._on_sent(outgoing)
        return moved

    def pull(self, flags: int = NOW, limit: int = STEP_BYTES) -> bool:
        """Receive once, or process received bytes; return whether anything happened.

        ``flags`` are recv's: without ``NOW`` the call blocks; with ``ALL`` it waits for the rest
        of a payload.
        """
        moved = False
        try:
            if self._target is None:
                if self._end - self._begin < PREFIX_BYTES:
                    self._read_ahead(flags)
                    moved = True
                    if self._end - self._begin < PREFIX_BYTES:
                        return True
                began = self._begin_frame()
                if not began or self._target is None:
                    return moved or began
                moved = True
            return self._fill(self._target, flags, limit) or moved
        except BlockingIOError:
            return moved
        except OSError as error:
            raise self.lost(error) from error

    def _read_ahead(self, flags: int) -> None:
        begin, end = self._begin, self._end
        if begin == end:
            begin = end = 0
        elif begin + PREFIX_BYTES > STAGING_BYTES:
            rest = bytes(self._staging[begin:end])
            begin, end = 0, len(rest)
            self._staging[:end] = rest
        # With ALL, a frame that is shorter than expected would block forever.
        flags &= ~ALL
        room = self._staging if not end else self._staging[end:]
        count = receive(self.first, room, flags, min(begin + self._ahead(), STAGING_BYTES) - end)
        self._begin, self._end = begin, end + count

    def _prefix(self) -> Prefix:
        """Return the prefix in the staged bytes."""
        return parse_prefix(self._staging[self._begin : self._begin + PREFIX_BYTES])

    def _use_staged(self, into: memoryview) -> int:
        """Move the staged bytes of a payload to ``into``; return their number."""
        ready = min(len(into), self._end - self._begin)
        if ready:
            into[:ready] = self._staging[self._begin : self._begin + ready]
            self._begin += ready
        return ready

    @abstractmethod
    def _on_sent(self, outgoing: FrameSend) -> None:
        """Handle a frame that was sent completely."""

    @abstractmethod
    def _ahead(self) -> int:
        """Return how many bytes to read at the next frame: ``PREFIX_BYTES`` or more."""

    @abstractmethod
    def _begin_frame(self) -> bool:
        """Find the memory of the frame whose prefix was read, and move its staged bytes there.

        If bytes are missing, the frame becomes ``_fill``'s target. False: it has no memory yet.
        """

    @abstractmethod
    def _fill(self, target: Any, flags: int, limit: int) -> bool:
        """Receive more bytes of a payload into its memory."""

    # The end.

    def withdraw(self) -> None:
        """Drop the outgoing frames. If one was sent in part, the connection ends."""
        if self.leaving and self.leaving[0].begun:
            self.reset(HALF_A_FRAME)  # the peer waits for the rest
        self.leaving.clear()

    def abort(self, reason: str = "the link was aborted") -> None:
        """Wake the threads that are blocked on this connection, here and on the peer. Thread-safe.

        This rank's threads and later calls raise ``CommunicatorAbortedError`` with ``reason``.
        """
        self.reset(reason)

    def reset(self, reason: str) -> None:
        """End the connection by a reset. An orderly end would queue behind sent data, and never
        reach a peer that is blocked in sending and does not read.
        """
        with contextlib.suppress(OSError):  # the connection has ended already
            for sock in self.sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.end(reason)

    def close(self) -> None:
        """End the connection. Frames that were sent before still arrive. Idempotent.

        A thread in a call raises ``CommunicatorAbortedError``, and closes the sockets.
        """
        self.end("the link was closed")

    def end(self, reason: str, *, peer_left: bool = False) -> None:
        """End the connection: later calls raise PeerLostError if ``peer_left``, else
        CommunicatorAbortedError. Only the first call sets the reason.
        """
        if self.ended is None:
            self.ended = reason
            self._peer_left = peer_left
        # Wakes threads in system calls, after which the worker closes the descriptors.
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.worker.retire(self)

    def close_sockets(self) -> None:
        """Close the sockets. For the worker, when no thread uses them."""
        for sock in self.sockets:
            sock.close()

    def lost(self, reason: object) -> Exception:
        """Return the error for an ended connection, which depends on the rank that ended it."""
        if self.ended is not None and not self._peer_left:
            return CommunicatorAbortedError(self.ended)
        text = f"the connection to {self.name} was lost: {reason}"
        return PeerLostError(text, self.peer, is_out_of_reach(reason))
