"""A connection: frames in both directions over one authenticated socket.

Sending never blocks: bytes that cannot be sent at once wait in a queue, which the thread pool
empties. One thread receives at a time: a thread of the pool, or a caller that waits for its reply,
which saves a thread switch.
"""

from __future__ import annotations

import errno
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from transport._channel.buffer_pool import BufferPool
from transport._channel.frames import ChannelFrame, Control, FrameBuffer, FrameReader, pack
from transport._channel.short_send import ShortSend
from transport._channel.threads import ThreadPool
from transport._errors import DistError
from transport._net.tls_choice import is_tls
from transport._operands.flat import address
from transport._platform import SEND_NOW
from transport._shm.process_memory import ProcessMemory
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition, look
from transport._waiting.polling import PEER_CLOSED, READABLE, WRITABLE
from transport._waiting.spinning import SpinWait

QUEUE_BYTES = 1 << 20
"""If more bytes are queued, senders wait, and no requests are read from the peer."""
FETCH_BYTES = 96 << 10
"""Larger buffers are copied out of the sender's memory if the kernel allows it."""
WAIT_SECONDS = 0.02
"""After this time without a frame, a waiting caller lets the pool read."""
_PARTS_AT_ONCE = 64
_AT_ONCE = int(socket.MSG_DONTWAIT)
_TIMEVAL = struct.Struct("@ll")
# The reader: no thread until the next send, the pool, one thread now, or none until resumed.
_NO_READER, _POLL, _TURN, _PAUSED = range(4)


class Receiver(Protocol):
    """Handles the frames of a connection. Called in any thread; must not block."""

    def on_frames(self, connection: ChannelConnection, frames: Sequence[ChannelFrame]) -> bool:
        """Handle received frames; return False to stop reading until ``resume``."""
        ...

    def on_end(self, connection: ChannelConnection, error: Exception) -> None:
        """Handle the end of a connection with ``error``."""
        ...


class ChannelConnection:
    """A connection over the authenticated ``sock`` to the rank ``peer``.

    ``outgoing``: this side connected. ``receiver`` handles arriving frames.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        outgoing: bool,
        receiver: Receiver,
        threads: ThreadPool,
        pool: BufferPool,
    ) -> None:
        self.peer = peer
        self.outgoing = outgoing
        self.fd = sock.fileno()
        self.queued = 0
        """The number of bytes in the send queue."""
        self.memory: ProcessMemory | None = None
        """The peer's memory, if this side can read it."""
        self.lends = False
        """True if the peer can read this side's memory."""
        self._lent: dict[int, Sequence[memoryview]] = {}
        self.error: Exception | None = None
        self.pending: dict[int, Any] = {}
        """The owner's pending replies, by number. While it has entries, the pool reads."""
        self._sock = sock
        self._receiver = receiver
        self._threads = threads
        self._pool = pool
        self._frames = FrameReader()
        self._spin = SpinWait(pauses=True)
        self._found: list[ChannelFrame] = []
        self._sending = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._state = threading.Lock()
        self._reader = _NO_READER
        self._armed = self._resumed = False
        self._room = Condition()
        # TLS may hold received bytes that poll does not report.
        self._pending = sock.pending if is_tls(sock) else None
        self._short = sock if is_tls(sock) else ShortSend(sock)
        sock.settimeout(None)
        limit = _TIMEVAL.pack(0, int(WAIT_SECONDS * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def begin(self, poll: bool) -> None:
        """Let the pool watch the connection: for its end and, with ``poll``, for frames."""
        with self._state:
            self._reader = _POLL if poll else _NO_READER
            self._armed = True
            self._threads.register(self, self._events())

    def receive_one(self, deadline: Deadline) -> ChannelFrame:
        """Return the first frame, before ``begin``.

        Raises TimeoutError past ``deadline``, OSError if the connection ends or has an ``error``.
        """
        while True:
            if self.error is not None:
                raise ConnectionAbortedError(errno.ECONNABORTED, str(self.error))
            try:
                frames = self._frames.receive(self._sock)
            except (BlockingIOError, InterruptedError):
                look()
                if deadline.expired:
                    text = f"no frame arrived within {deadline.seconds:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, text) from None
                continue
            if frames:
                return frames[0]

    # ------------------------------------------------------------------ sending

    def send(
        self,
        kind: int,
        number: int,
        data: bytes = b"",
        buffers: Sequence[memoryview] = (),
        flags: int = 0,
    ) -> None:
        """Send a frame or queue it. Never blocks. Raises OSError if the connection has ended.

        The peer may read large ``buffers`` from this process's memory, until ``reclaim``.
        """
        if not buffers:
            self._send(pack(kind, number, data, flags=flags))
            return
        addresses = [0] * len(buffers)
        if self.lends:
            addresses = [
                address(np.frombuffer(b, np.uint8)) if b.nbytes >= FETCH_BYTES else 0
                for b in buffers
            ]
            if any(addresses):
                self._lent[number] = buffers
        self._send(pack(kind, number, data, buffers, addresses, flags))

    def reclaim(self, number: int) -> None:
        """Release the buffers of the sent frame ``number``: the peer has copied them."""
        self._lent.pop(number, None)

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        with self._sending:
            if self.error is not None:
                raise ConnectionError(errno.ENOTCONN, str(self.error))
            if len(parts) == 1 and not self.queued and self._send_at_once(parts[0]):
                return
            views = [memoryview(part).cast("B") for part in parts]
            self._queue.extend(views)
            if self.queued:
                self.queued += sum(view.nbytes for view in views)
                return
            if self._flush():
                return
        with self._state:
            self._arm()

    def _send_at_once(self, part: bytes | memoryview) -> bool:
        """Send a frame of one part; False if no byte could be sent."""
        try:
            count = self._short.send(part, SEND_NOW)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.shut(ConnectionResetError(errno.ECONNRESET, "it hung up"))
            raise
        if count == len(part):
            return True
        self._queue.append(memoryview(part)[count:])
        self.queued = len(part) - count
        with self._state:
            self._arm()
        return True

    def _flush(self) -> bool:
        """Send the queue; False if bytes are left. The caller holds ``_sending``."""
        queue = self._queue
        try:
            while queue:
                views = queue if len(queue) <= _PARTS_AT_ONCE else [*queue][:_PARTS_AT_ONCE]
                count = self._sock.sendmsg(views, (), SEND_NOW)
                while queue and count >= queue[0].nbytes:
                    count -= queue.popleft().nbytes
                if count:
                    queue[0] = queue[0][count:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            queue.clear()
            self.queued = 0
            # The reader reports the cause, after the bytes that arrived before the end.
            self.shut(ConnectionResetError(errno.ECONNRESET, "it hung up"))
            raise
        self.queued = sum(view.nbytes for view in queue)
        return not queue

    def wait_for_room(self, timeout: float | None) -> None:
        """Wait until the queue is short or the connection has ended, up to ``timeout`` seconds."""
        self.poll()
        with self._threads.slot_released(), self._room:
            self._room.wait_for(
                lambda: self.queued < QUEUE_BYTES or self.error is not None, timeout
            )

    # ------------------------------------------------------------------ receiving

    def poll(self) -> None:
        """Let the pool read the connection, unless another thread does."""
        with self._state:
            if self._reader == _NO_READER:
                self._reader = _POLL
                self._arm()

    def resume(self) -> None:
        """End a pause of reading, or cancel one that is about to begin."""
        with self._state:
            self._resumed = self._reader == _TURN
            if self._reader == _PAUSED:
                self._reader = _POLL
                self._arm()

    @property
    def is_choked(self) -> bool:
        """True if more than ``QUEUE_BYTES`` are queued."""
        return self.queued > QUEUE_BYTES

    def read_until(self, done: Callable[[], bool]) -> None:
        """Read in the calling thread until ``done()``, or for a moment.

        Returns at once if another thread reads. While replies are ``pending``, the pool continues
        reading.
        """
        with self._state:
            if self._reader in (_TURN, _PAUSED) or self.error is not None:
                return
            polled, self._reader = self._reader == _POLL, _TURN
            if polled:
                self._arm()
        try:
            while not done():
                look()
                self._receiver.on_frames(self, self._receive())
        except (BlockingIOError, InterruptedError):
            self._end_turn(_POLL)
        except KeyboardInterrupt:  # between two reads: nothing is lost
            self._end_turn(_POLL)
            raise
        except (DistError, OSError) as error:
            self._end(error)
        else:
            self._end_turn(_NO_READER)

    def ready(self, events: int) -> None:
        """Handle the events from the pool."""
        with self._state:
            self._armed = False
            mine = self._reader != _TURN and bool(events & ~WRITABLE)
            if not mine and self._pending is not None:
                mine = self._reader == _POLL and self._pending() > 0
            if mine:
                self._reader = _TURN
            elif self.fd >= 0 and self.queued and not events & WRITABLE:
                self._arm()
        if events & WRITABLE and self.queued:
            self._go_on_sending()
        if mine:
            self._take_turn(self._receive_now)
        else:
            with self._state:
                self._arm_again()

    def look(self) -> bool:
        """Wait a moment for another request, and handle it; False if none arrived."""
        if self.outgoing or not self._spin.looks:
            return False
        with self._state:
            if self._reader != _POLL or self.error is not None:
                return False
            self._reader = _TURN
            self._arm()
        return self._take_turn(self._receive_soon)

    def _take_turn(self, receive: Callable[[], list[ChannelFrame] | None]) -> bool:
        """Receive frames and handle them; False if none arrived."""
        frames: list[ChannelFrame] | None = None
        goes_on = True
        try:
            frames = receive()
            if frames is not None:
                goes_on = self._receiver.on_frames(self, frames)
            while goes_on and self._frames.may_have_more:
                goes_on = self._receiver.on_frames(self, self._receive_now())
        except (BlockingIOError, InterruptedError):
            self._end_turn(_POLL)
        except (DistError, OSError) as error:
            self._end(error)
        else:
            self._end_turn(_POLL if goes_on else _PAUSED)
        return frames is not None

    def _receive(self) -> list[ChannelFrame]:
        found = self._receive_soon() if self._spin.looks else None
        return self._frames.receive(self._sock) if found is None else found

    def _receive_now(self) -> list[ChannelFrame]:
        return self._frames.receive(self._sock, _AT_ONCE)

    def _receive_soon(self) -> list[ChannelFrame] | None:
        """Return the frames that arrive within a moment; None if none do."""
        if not self._spin.until(self._finds):
            return None
        found, self._found = self._found, []
        return found

    def _finds(self) -> bool:
        try:
            self._found = self._receive_now()
        except (BlockingIOError, InterruptedError):
            return False
        return True

    def _go_on_sending(self) -> None:
        with self._sending:
            try:
                done = self._flush()
            except OSError:
                done = True
        if self.queued < QUEUE_BYTES:
            with self._room:
                self._room.notify_all()
        if done:
            self.resume()

    def _end_turn(self, reader: int) -> None:
        with self._state:
            # A sender adds to ``pending`` before it sends, and leaves the reading to this turn.
            if reader == _NO_READER and (self.pending or not self.outgoing):
                reader = _POLL
            if reader == _PAUSED and self._resumed:
                reader = _POLL
            self._resumed = False
            self._reader = reader
            if reader == _POLL or self.error is not None:
                self._arm()
            else:
                self._arm_again()

    def _events(self) -> int:
        events = 0 if self._reader in (_TURN, _PAUSED) else PEER_CLOSED
        if self._reader == _POLL:
            events |= READABLE
            if self._pending is not None and self._pending():
                events |= WRITABLE  # reported at once
        if self.queued:
            events |= WRITABLE
        return events

    def _arm(self) -> None:
        if self.fd >= 0:
            self._armed = True
            self._threads.arm(self, self._events())

    def _arm_again(self) -> None:
        """Arm the poller if an event has disarmed it. During a turn, only if bytes are queued."""
        if not self._armed and (self._reader != _TURN or self.queued):
            self._arm()

    # ------------------------------------------------------------------ memory

    def fetch(self, frame: ChannelFrame) -> list[memoryview]:
        """Return the buffers of ``frame``, copied from the peer's memory if they were not sent.

        Raises OSError if that memory cannot be read.
        """
        return [
            self._fetch(buffer) if buffer.memory is None else buffer.memory
            for buffer in frame.buffers
        ]

    def acknowledge(self, frame: ChannelFrame) -> None:
        """If the peer lent buffers of ``frame``, notify it that they were copied."""
        if any(buffer.memory is None for buffer in frame.buffers):
            with suppress(OSError):
                self.send(Control.FETCHED, frame.number)

    def _fetch(self, buffer: FrameBuffer) -> memoryview:
        if self.memory is None:
            raise OSError(errno.EPERM, "the memory of the sender cannot be read")
        into = self._pool.take(buffer.nbytes)
        self.memory.read(buffer.address, into)
        return into.data

    # ------------------------------------------------------------------ the end

    def shut(self, error: Exception) -> None:
        """End the connection, which the reading thread closes. Thread-safe; never blocks."""
        if self.error is None:
            self.error = error
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._state:
            if self._reader == _PAUSED:
                self._reader = _POLL
            if self._reader != _TURN:
                self._arm()

    def _end(self, error: Exception) -> None:
        """Close the connection, in the reading thread."""
        self.error = self.error or error
        with self._sending, self._state:
            self._threads.forget(self)
            self.fd: int = -1
            self._sock.close()
            self._queue.clear()
            self.queued: int = 0
            self._lent.clear()
        with self._room:
            self._room.notify_all()
        self._receiver.on_end(self, self.error)
