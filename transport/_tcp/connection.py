"""A connection to one member: its sockets, the frames that leave, and the one that comes."""

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

# Between processes of one machine the kernel lets megabytes pile up, which fall out of the caches
# before the receiver copies them; this is a third faster. Elsewhere the kernel knows better.
_LOCAL_SEND_BUFFER = 512 << 10
_RESET = struct.pack("@ii", 1, 0)  # as SO_LINGER: close at once, without what is still queued
HALF_A_FRAME = "an earlier call stopped in the middle of a frame"


class TcpConnection(ABC):
    """Frames to and from ``peer`` over ``sockets``, which belong to the connection from now on.

    ``name`` is the peer's name in messages. Bytes move under ``worker.lock``. What a received frame
    is for is up to the two kinds: collectives' frames have been posted, messages are announced.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], peer: int, name: str, worker: LinkWorker
    ) -> None:
        self.peer = peer
        self.name = name
        self.sockets: Sequence[socket.socket] = tuple(sockets)
        self.first: socket.socket = self.sockets[0]
        """Carries the prefixes."""
        self.worker = worker
        self.leaving: deque[FrameSend] = deque()
        self.ended: str | None = None
        """Why nothing moves here any more."""
        self._peer_left = False
        # The bytes that were read and not used yet; the frame whose payload is on its way.
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
        """Have a frame leave behind those that are leaving; send what fits at once."""
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
        """Send what fits, up to a step; return whether anything did."""
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
            self._note_left(outgoing)
        return moved

    def pull(self, flags: int = NOW, limit: int = STEP_BYTES) -> bool:
        """Receive once, or go on with what was received; return whether anything happened.

        ``flags`` are recv's: without ``NOW`` it waits for something, with ``ALL`` for the rest of a
        payload.
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
        # Were the frame a shorter one than expected, waiting for all of it would hang.
        flags &= ~ALL
        room = self._staging if not end else self._staging[end:]
        count = receive(self.first, room, flags, min(begin + self._ahead(), STAGING_BYTES) - end)
        self._begin, self._end = begin, end + count

    def _prefix(self) -> Prefix:
        """Return the prefix that was read."""
        return parse_prefix(self._staging[self._begin : self._begin + PREFIX_BYTES])

    def _use_staged(self, into: memoryview) -> int:
        """Move what was read of a payload ``into`` its memory; return how much that is."""
        ready = min(len(into), self._end - self._begin)
        if ready:
            into[:ready] = self._staging[self._begin : self._begin + ready]
            self._begin += ready
        return ready

    @abstractmethod
    def _note_left(self, outgoing: FrameSend) -> None:
        """Note that a frame has left."""

    @abstractmethod
    def _ahead(self) -> int:
        """Return how much to read where the next frame begins: ``PREFIX_BYTES`` or more."""

    @abstractmethod
    def _begin_frame(self) -> bool:
        """Find the memory of the frame whose prefix was read, and put what was read of it there.

        If more is to come, the frame is the target of ``_fill``. False: it has to wait.
        """

    @abstractmethod
    def _fill(self, target: Any, flags: int, limit: int) -> bool:
        """Receive more of a payload, straight to where it belongs."""

    # The end.

    def withdraw(self) -> None:
        """Forget the frames that are to leave; the end, in the middle of one."""
        if self.leaving and self.leaving[0].begun:
            self.reset(HALF_A_FRAME)  # the peer waits for the rest
        self.leaving.clear()

    def abort(self, reason: str = "the link was aborted") -> None:
        """Wake the threads that are blocked on this connection, here and on the peer. Thread-safe.

        Those here raise ``CommunicatorAbortedError`` with ``reason``, as do all later calls.
        """
        self.reset(reason)

    def reset(self, reason: str) -> None:
        """End the connection by a reset. An orderly end would queue up behind data that was sent,
        and never get past a peer that is blocked in sending and does not read.
        """
        with contextlib.suppress(OSError):  # gone already
            for sock in self.sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.end(reason)

    def close(self) -> None:
        """End the connection. Frames that were sent before still arrive. Idempotent.

        A thread that is in a call raises ``CommunicatorAbortedError``, and closes the socket.
        """
        self.end("the link was closed")

    def end(self, reason: str, *, peer_left: bool = False) -> None:
        """End the connection: later calls raise ``PeerLostError`` if ``peer_left`` first."""
        if self.ended is None:
            self.ended = reason
            self._peer_left = peer_left
        # Wakes threads in a system call; only then may the descriptor be closed.
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.worker.retire(self)

    def close_sockets(self) -> None:
        """For the worker: nobody uses them."""
        for sock in self.sockets:
            sock.close()

    def lost(self, reason: object) -> Exception:
        """Return the error for a connection that ended: ours, where this rank ended it."""
        if self.ended is not None and not self._peer_left:
            return CommunicatorAbortedError(self.ended)
        text = f"the connection to {self.name} was lost: {reason}"
        return PeerLostError(text, self.peer, is_out_of_reach(reason))
