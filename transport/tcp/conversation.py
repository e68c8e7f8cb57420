"""Point-to-point messages to and from one member, over one connection."""

from __future__ import annotations

import errno
import math
import select
import socket
import struct
import threading
from collections.abc import Callable

from transport.call import Call, CallHeader, Kind
from transport.condition import Condition, let_go
from transport.deadline import Deadline
from transport.errors import CommunicatorAbortedError, PeerLostError
from transport.links.incoming import Incoming
from transport.links.mailbox import Mailbox
from transport.net.reach import is_out_of_reach
from transport.tcp.frame import NOW, PREFIX_BYTES, STAGING_BYTES, parse_prefix
from transport.tcp.link import TcpLink
from transport.waiting import LookOut

# Of a large message hardly more than a small one has is copied out of here.
_BUFFER_BYTES = STAGING_BYTES
_JOIN_SECONDS = 5.0
# How long the thread leaves the connection alone after a receiver has read from it.
_AWAY_SECONDS = 0.01
_SLICE_SECONDS = 1.0
_NO_LIMIT = struct.pack("@ll", 0, 0)
_MOMENT = struct.pack("@ll", 0, 5000)


class Conversation:
    """Sends messages, and reads the peer's into ``mailbox``.

    A receiver that waits for the peer reads for itself (``carry``), which spares two switches of
    threads a message. For everything else there is a daemon thread: it reads while nobody waits,
    for those who wait for any member, and notices when the peer leaves. Whoever has the ``turn``
    may read; the other finds everything where it was left, also in the middle of a message.

    Small messages are read several at a time; the payload of a large one goes from the socket to
    where the mailbox wants it. ``sock`` belongs to the conversation from now on. ``name`` is what
    messages call ``peer``, a group rank. ``on_speak`` is told of the peer's first message here;
    when nothing more will come, the thread calls ``on_end`` with this object and the reason, as
    its last act.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        name: str,
        mailbox: Mailbox,
        on_speak: Callable[[Conversation], None],
        on_end: Callable[[Conversation, PeerLostError], None],
    ) -> None:
        self.peer = peer
        self._name = name
        self._sending = TcpLink(sock, peer, name, self.resume)
        self._sock = sock = self._sending.hold()
        # The thread waits for as long as it takes; abort() wakes it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_LIMIT)
        self._mailbox = mailbox
        self._on_speak = on_speak
        self._on_end = on_end
        self._turn = threading.RLock()
        self._away = Condition()
        self._carried = False  # by a receiver, or one would have; since the thread last looked
        # What was read: under the turn.
        self._failure: Exception | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = 0  # of what has been read and not been used
        self._end = 0
        self._message: Incoming | None = None  # the one whose payload is on its way
        self._filled = 0
        self._spoken = False
        self._look_out = LookOut(pauses=True, main_only=True)
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._thread = threading.Thread(
            target=self._run, name=f"meshlib-tcp-messages-{peer}", daemon=True
        )
        self._thread.start()

    def send(self, call: Call, data: memoryview) -> None:
        """Send one message; raises as ``Link.send`` does. Any number of threads."""
        self._sending.send(call, data)

    def take_turn(self) -> bool:
        """Return whether the caller may ``carry`` now. If not, the thread will leave it its turn
        after the next message.
        """
        self._carried = True
        return self._turn.acquire(blocking=False)

    def carry(self, settled: Callable[[], bool], deadline: Deadline) -> None:
        """Read messages until ``settled()``, the deadline, or the end of the connection.

        For those who took the turn; it is over then.
        """
        try:
            while True:
                if self._failure is not None or settled():
                    break
                # What was read already must be used before the socket is asked for more.
                if self._look_out.until(self._advance_now):
                    continue
                remaining = deadline.remaining()
                self._poller.poll(math.ceil(1000 * min(remaining, _SLICE_SECONDS)))
                if not self._advance(NOW) and remaining <= 0:
                    break
        except Exception as error:  # noqa: BLE001 (the thread deals with it)
            self._failure = error
        except BaseException:
            self._failure = ConnectionAbortedError(errno.ECONNABORTED, "a receiver was interrupted")
            raise
        finally:
            self._carried = True
            self._turn.release()

    def end_turn(self) -> None:
        """Give back a turn that an interrupt may have left taken."""
        let_go(self._turn)

    def resume(self) -> None:
        """Have the thread read again: somebody waits for what nobody else reads."""
        self._carried = False
        with self._away.lock:
            self._away.notify_all()

    def abort(self, reason: str) -> None:
        """Wake the senders here and the peer, and have the thread end. Never blocks."""
        self._sending.abort(reason)
        self.resume()

    def close(self) -> None:
        """Wake the senders here, and have the thread end; what was sent before still arrives."""
        self._sending.close()
        self.resume()

    def join(self) -> None:
        """Wait for what both bring about: the thread has ended, the socket is closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while self._failure is None:
            self._stay_away()
            with self._turn:
                # A receiver may have had the turn for long, and gone only now.
                if not self._left_to_receivers():
                    self._read()
        match self._failure:
            case CommunicatorAbortedError():
                reason = "this rank aborted"
            case failure:
                reason = str(failure)
        with self._turn:  # A receiver may still be about to find out.
            self._sending.let_go(reason)
        text = f"the connection to {self._name} was lost: {reason}"
        self._on_end(self, PeerLostError(text, self.peer, is_out_of_reach(self._failure)))

    def _stay_away(self) -> None:
        """Return when no receiver has read for a while, or somebody wants the thread to."""
        if not self._left_to_receivers():
            return
        with self._away.lock:
            while self._carried:
                self._carried = False
                self._away.wait(_AWAY_SECONDS)

    def _left_to_receivers(self) -> bool:
        return self._carried and not self._mailbox.awaits(self.peer)

    def _read(self) -> None:
        """Wait for a message, and read until there is none begun. Under the turn."""
        try:
            while self._failure is None:
                self._advance(0 if self._message is None else socket.MSG_WAITALL)
                if self._message is None and self._begin == self._end:
                    return
        except Exception as error:  # noqa: BLE001 (it ends the conversation)
            self._failure = error

    def _advance_now(self) -> bool:
        return self._advance(NOW)

    def _advance(self, flags: int) -> bool:
        """Go on with what comes next: read once, or hand over what was read.

        Returns False when there was nothing to do with these ``flags`` of recv. Raises OSError at
        the end of the stream.
        """
        try:
            if self._message is not None:
                self._fill(self._message, flags)
            elif self._end - self._begin < PREFIX_BYTES:
                self._read_ahead(flags)
            else:
                self._begin_message()
        except BlockingIOError:
            return False
        return True

    def _begin_message(self) -> None:
        header, size = parse_prefix(self._buffer[self._begin : self._begin + PREFIX_BYTES])
        message = self._announce(header, size)
        if not self._spoken:
            self._spoken = True
            self._on_speak(self)
        self._begin += PREFIX_BYTES
        ready = min(size, self._end - self._begin)
        with message.guard:
            message.buffer[:ready] = self._buffer[self._begin : self._begin + ready]
        self._begin += ready
        if ready == size:
            message.complete()
        else:
            self._message, self._filled = message, ready

    def _announce(self, header: CallHeader, size: int) -> Incoming:
        if header.kind != Kind.SEND:
            raise _ProtocolError(f"it sent {header} where only messages are expected")
        try:
            return self._mailbox.begin(self.peer, header, size)
        except (MemoryError, ValueError, OverflowError):
            raise _ProtocolError(f"it announced a message of {size} bytes") from None

    def _read_ahead(self, flags: int) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin + PREFIX_BYTES > _BUFFER_BYTES:
            rest = bytes(self._buffer[self._begin : self._end])
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        self._end += self._receive(self._buffer[self._end :], flags)

    def _fill(self, message: Incoming, flags: int) -> None:
        """Receive more of a payload, straight to where it belongs."""
        try:
            if message.stored:
                self._filled += self._receive(message.buffer[self._filled :], flags)
            elif flags & socket.MSG_DONTWAIT:
                with message.guard:
                    self._filled += self._receive(message.buffer[self._filled :], flags)
            else:
                self._fill_for_a_moment(message, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            text = f"the connection to {self._name} was lost in the middle of a message: {error}"
            message.fail(PeerLostError(text, self.peer, is_out_of_reach(error)))
            raise
        if self._filled == message.buffer.nbytes:
            self._message = None
            message.complete()

    def _fill_for_a_moment(self, message: Incoming, flags: int) -> None:
        """Receive what comes without a pause; in a pause, wait outside of the guard: a receiver
        that gives up must not wait for the kernel to let go of its memory.
        """
        with message.guard:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _MOMENT)
            try:
                self._filled += self._receive(message.buffer[self._filled :], flags)
                return
            except BlockingIOError:
                pass
            finally:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_LIMIT)
        self._poller.poll()

    def _receive(self, into: memoryview, flags: int) -> int:
        count = self._sock.recv_into(into, 0, flags)
        if count == 0:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        return count


class _ProtocolError(Exception):
    """What came is not what a member sends."""
