"""A connection that carries point-to-point messages."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from transport._calls.call import Call
from transport._calls.header import Kind
from transport._errors import CommunicatorAbortedError, PeerLostError
from transport._link import OnPiece
from transport._links.incoming import IncomingMessage
from transport._links.mailbox import Mailbox
from transport._tcp.connection import HALF_A_FRAME, TcpConnection
from transport._tcp.frame import (
    PREFIX_BYTES,
    STAGING_BYTES,
    FrameReceive,
    FrameSend,
    receive,
)

if TYPE_CHECKING:
    from transport._tcp.inbox import MessageWorker


class MessageLink(TcpConnection):
    """Messages to one member, and from it to ``mailbox``, over ``sock``.

    Several small messages are read at a time. The payload of a large one is received directly into
    the mailbox's buffer for it.
    """

    worker: MessageWorker

    def __init__(
        self, sock: socket.socket, peer: int, name: str, worker: MessageWorker, mailbox: Mailbox
    ) -> None:
        super().__init__((sock,), peer, name, worker)
        self.descriptor: int = sock.fileno()
        self.full: bool = False
        """True if the mailbox had no room for the next message."""
        self.watched: bool = True
        """True if the link is registered with the worker's poller."""
        self._mailbox = mailbox
        self._filled = 0
        self._pending: Callable[[], int] | None = getattr(sock, "pending", None)  # TLS has one

    def send(self, call: Call, data: memoryview) -> None:
        """Send one message; raise the errors of ``Link.send``. Thread-safe."""
        worker = self.worker
        worker.lock.acquire()
        try:
            sent = self.post(call, data)
        except Exception:
            if self.leaving:
                self.reset(HALF_A_FRAME)
            raise
        finally:
            worker.leave()
        if not sent.done:
            sent.wait()

    def wait(self, request: FrameSend | FrameReceive, on_piece: OnPiece | None = None) -> None:
        assert isinstance(request, FrameSend)
        try:
            while True:
                self.worker.await_room(self, request.call)
                self.worker.lock.acquire()
                try:
                    self.check_open()
                    self.push()
                finally:
                    self.worker.leave()
                if request.done:
                    return
        finally:
            if not request.done:
                self._withdraw_send(request)
            self.worker.resume()  # for receivers that sleep because this thread was reading

    def _withdraw_send(self, outgoing: FrameSend) -> None:
        """Withdraw a frame whose sender gives up. If it was sent in part, the connection ends."""
        self.worker.lock.acquire()
        try:
            if outgoing.begun:
                self.withdraw()
            else:
                with contextlib.suppress(ValueError):
                    self.leaving.remove(outgoing)
        finally:
            self.worker.leave()

    # Reading, under the worker's lock.

    @property
    def staged(self) -> bool:
        """True if bytes were read that the poller does not report any more."""
        if self._target is None and self._end - self._begin >= PREFIX_BYTES:
            return True
        return self._pending is not None and self._pending() > 0

    def fail(self, reason: BaseException) -> PeerLostError:
        """End the connection, because the peer has left or broke the protocol; return the error
        for waiting threads.
        """
        aborted = isinstance(reason, CommunicatorAbortedError)
        bare = "this rank aborted" if aborted else str(reason.__cause__ or reason)
        text = f"the connection to {self.name} was lost"
        out_of_reach = isinstance(reason, PeerLostError) and reason.unreachable
        message, self._target = self._target, None
        if message is not None:
            half = f"{text} during a message: {bare}"
            message.fail(PeerLostError(half, self.peer, out_of_reach))
        self.end(bare, peer_left=True)
        return PeerLostError(f"{text}: {bare}", self.peer, out_of_reach)

    def _on_sent(self, outgoing: FrameSend) -> None:
        pass

    def _ahead(self) -> int:
        return STAGING_BYTES

    def _begin_frame(self) -> bool:
        begin = self._begin
        prefix = self._prefix()
        header, size = prefix.header, prefix.size
        if header.kind != Kind.SEND:
            raise _ProtocolError(f"it sent {header}; expected a message")
        try:
            message = self._mailbox.try_begin(self.peer, header, size)
        except (MemoryError, ValueError, OverflowError):
            raise _ProtocolError(f"it announced a message of {size} bytes") from None
        self.full = message is None
        if message is None:
            return False
        self.worker.speaking[self.peer] = self
        self._begin = begin + PREFIX_BYTES
        with message.guard:
            self._filled = self._use_staged(message.buffer)
        if self._filled == size:
            message.complete()
        else:
            self._target = message
        return True

    def _fill(self, target: IncomingMessage, flags: int, limit: int) -> bool:
        with target.guard:
            into = target.buffer[self._filled :]
            self._filled += receive(self.first, into, flags, limit)
        if self._filled == target.buffer.nbytes:
            self._target = None
            target.complete()
        return True


class _ProtocolError(Exception):
    """The peer violated the protocol."""
