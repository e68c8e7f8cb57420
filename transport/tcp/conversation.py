"""Point-to-point messages to and from one member, over one connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from transport.call import Call, CallHeader, Kind
from transport.errors import CommunicatorAbortedError, PeerLostError
from transport.mailbox import Incoming, Mailbox
from transport.tcp.frame import PREFIX_BYTES, parse_prefix
from transport.tcp.link import TcpLink

_BUFFER_BYTES = 64 << 10
_JOIN_SECONDS = 5.0


class Conversation:
    """Sends messages, and reads the peer's into ``mailbox`` in a daemon thread of its own.

    Small messages are read several at a time; the payload of a large one goes from the socket to
    where the mailbox wants it. ``sock`` belongs to the conversation from now on. ``name`` is what
    messages call ``peer``, a group rank. When nothing more will come, the thread calls ``on_end``
    with this object and the reason, as its last act.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        name: str,
        mailbox: Mailbox,
        on_end: Callable[[Conversation, PeerLostError], None],
    ) -> None:
        self.peer = peer
        self._name = name
        self._sending = TcpLink(sock, peer, name)
        self._sock = self._sending.hold()
        # The reader waits for as long as it takes; abort() wakes it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(16))
        self._mailbox = mailbox
        self._on_end = on_end
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = 0  # of what has been read and not been used
        self._end = 0
        self._thread = threading.Thread(
            target=self._run, name=f"meshlib-tcp-messages-{peer}", daemon=True
        )
        self._thread.start()

    def send(self, call: Call, data: memoryview) -> None:
        """Send one message; raises as ``Link.send`` does. Any number of threads."""
        self._sending.send(call, data)

    def abort(self, reason: str) -> None:
        """Wake the senders here and the peer, and have the thread end. Never blocks."""
        self._sending.abort(reason)

    def close(self) -> None:
        """Wake the senders here, and have the thread end; what was sent before still arrives."""
        self._sending.close()

    def join(self) -> None:
        """Wait for what both bring about: the thread has ended, the socket is closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        reason = "it hung up"
        try:
            while self._read_ahead(PREFIX_BYTES):
                self._receive()
        except CommunicatorAbortedError:
            reason = "this rank aborted"
        except (OSError, _ProtocolError) as error:
            reason = str(error)
        finally:
            self._sending.let_go(reason)
        text = f"the connection to {self._name} was lost: {reason}"
        self._on_end(self, PeerLostError(text, self.peer))

    def _receive(self) -> None:
        header, size = parse_prefix(self._buffer[self._begin : self._begin + PREFIX_BYTES])
        self._begin += PREFIX_BYTES
        incoming = self._announce(header, size)
        try:
            self._fill(incoming.buffer)
        except OSError as error:
            text = f"the connection to {self._name} was lost in the middle of a message: {error}"
            incoming.fail(PeerLostError(text, self.peer))
            raise
        incoming.complete()

    def _announce(self, header: CallHeader, size: int) -> Incoming:
        if header.kind != Kind.SEND:
            raise _ProtocolError(f"it sent {header} where only messages are expected")
        try:
            return self._mailbox.begin(self.peer, header, size)
        except (MemoryError, ValueError, OverflowError):
            raise _ProtocolError(f"it announced a message of {size} bytes") from None

    def _read_ahead(self, size: int) -> bool:
        """Read until ``size`` bytes are in the buffer; False at the end of the stream."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin + size > _BUFFER_BYTES:
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        while self._end - self._begin < size:
            count = self._sock.recv_into(self._buffer[self._end :])
            if count == 0:
                return False
            self._end += count
        return True

    def _fill(self, into: memoryview) -> None:
        """Fill ``into`` with what was read ahead, then from the socket."""
        done = min(len(into), self._end - self._begin)
        into[:done] = self._buffer[self._begin : self._begin + done]
        self._begin += done
        while done < len(into):
            count = self._sock.recv_into(into[done:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionResetError("it hung up")
            done += count


class _ProtocolError(Exception):
    """What came is not what a member sends."""
