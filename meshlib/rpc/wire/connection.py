"""One connection: the calls of the side that dialled go one way, replies come the other.

Sending never blocks: what the peer does not take at once waits in a queue, which the shared poll
empties. Receiving is a turn that one thread takes: one of the poll's, or a caller that waits for
its own reply and so saves a switch between threads.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib.rpc.wire.brief import Brief
from meshlib.rpc.wire.frames import Buffer, Frame, FrameReader, pack
from meshlib.rpc.wire.payload import Payload
from transport.condition import Condition
from transport.deadline import Deadline
from transport.errors import DistError
from transport.net.tls_choice import is_tls
from transport.operands.copying import address
from transport.shm.process_memory import ProcessMemory
from transport.waiting import LookOut

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent

QUEUE_BYTES = 1 << 20
"""Who has more waiting for its peer waits itself, and takes no more requests from it."""
FETCH_BYTES = 96 << 10
"""From so many bytes on, a buffer is fetched from its owner's memory where that can be."""
WAIT_SECONDS = 0.02
"""A caller that has had no reply for so long leaves the reading to the poll."""
_PARTS_AT_ONCE = 64
# Shorter than members of a group do: several threads of a process may look at once.
_LOOK_SECONDS = 200e-6
_AT_ONCE = int(socket.MSG_DONTWAIT)
_SEND_AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_TIMEVAL = struct.Struct("@ll")
_NOBODY, _POLL, _TURN, _PAUSED = range(4)


class Connection:
    """``sock`` is authenticated; ``peer`` the rank at its other end; ``outgoing``: we dialled."""

    def __init__(self, sock: socket.socket, peer: int, outgoing: bool, owner: Agent) -> None:
        self.peer = peer
        self.outgoing = outgoing
        self.fd = sock.fileno()
        self.queued = 0
        """Bytes that wait for the peer to take them."""
        self.memory: ProcessMemory | None = None
        """The peer's memory, if it can be read."""
        self.lends = False
        """Whether the peer can read ours."""
        self.lent: dict[int, Sequence[memoryview]] = {}
        """Our buffers that it may read, by the call's number."""
        self.error: Exception | None = None
        self.calls: dict[int, Any] = {}
        """Our calls that wait for a reply on it."""
        self._sock = sock
        self._owner = owner
        self._threads = owner.threads
        self._frames = FrameReader()
        self._look_out = LookOut(pauses=True, seconds=_LOOK_SECONDS)
        self._found: list[Frame] = []
        self._sending = threading.Lock()
        self._queue: deque[memoryview] = deque()
        self._state = threading.Lock()
        self._reader = _NOBODY
        self._armed = self._resumed = False
        self._room = Condition()
        # What TLS has received and nobody has read, of which the poll does not tell.
        self._pending = sock.pending if is_tls(sock) else None
        self._brief = sock if is_tls(sock) else Brief(sock)
        sock.settimeout(None)
        limit = _TIMEVAL.pack(0, int(WAIT_SECONDS * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def begin(self, poll: bool) -> None:
        """Have the threads poll it: for its end and, with ``poll``, for what comes."""
        with self._state:
            self._reader = _POLL if poll else _NOBODY
            self._armed = True
            self._threads.register(self, self._events())

    def receive_one(self, deadline: Deadline) -> Frame:
        """Return the first frame that comes, before ``begin``.

        Raises TimeoutError past ``deadline``, OSError when the connection ends or has an ``error``.
        """
        while True:
            if self.error is not None:
                raise ConnectionAbortedError(errno.ECONNABORTED, str(self.error))
            try:
                frames = self._frames.receive(self._sock)
            except (BlockingIOError, InterruptedError):
                if deadline.expired:
                    text = f"nothing came for {deadline.seconds:g} s"
                    raise TimeoutError(errno.ETIMEDOUT, text) from None
                continue
            if frames:
                return frames[0]

    # ------------------------------------------------------------------ sending

    def send(self, kind: int, call: int, payload: Payload | None = None, flags: int = 0) -> None:
        """Send a frame, or have it sent. Never blocks; raises OSError where it cannot be sent."""
        if payload is None:
            self._send(pack(kind, call, b"", flags=flags))
            return
        buffers = payload.buffers
        if not buffers:
            self._send(pack(kind, call, payload.data, flags=flags))
            return
        addresses = [0] * len(buffers)
        if self.lends:
            addresses = [
                address(np.frombuffer(b, np.uint8)) if b.nbytes >= FETCH_BYTES else 0
                for b in buffers
            ]
            if any(addresses):
                self.lent[call] = buffers
        self._send(pack(kind, call, payload.data, buffers, addresses, flags))

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
        """Send a frame of one part, the usual small one; False if the peer takes none of it."""
        try:
            count = self._brief.send(part, _SEND_AT_ONCE)
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
        """Send what is queued; False if the peer does not take it all. With ``_sending``."""
        queue = self._queue
        try:
            while queue:
                views = queue if len(queue) <= _PARTS_AT_ONCE else [*queue][:_PARTS_AT_ONCE]
                count = self._sock.sendmsg(views, (), _SEND_AT_ONCE)
                while queue and count >= queue[0].nbytes:
                    count -= queue.popleft().nbytes
                if count:
                    queue[0] = queue[0][count:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            queue.clear()
            self.queued = 0
            # The reader learns why; what came before the end is still to be read.
            self.shut(ConnectionResetError(errno.ECONNRESET, "it hung up"))
            raise
        self.queued = sum(view.nbytes for view in queue)
        return not queue

    def wait_for_room(self, timeout: float | None) -> None:
        """Wait until the queue is short again, the connection over, or ``timeout``."""
        self.poll()
        with self._threads.slot_given_up(), self._room.lock:
            self._room.wait_for(
                lambda: self.queued < QUEUE_BYTES or self.error is not None, timeout
            )

    # ------------------------------------------------------------------ receiving

    def poll(self) -> None:
        """Have the threads read it, unless somebody does."""
        with self._state:
            if self._reader == _NOBODY:
                self._reader = _POLL
                self._arm()

    def resume(self) -> None:
        """Read on, after a pause, or instead of one that is about to begin."""
        with self._state:
            self._resumed = self._reader == _TURN
            if self._reader == _PAUSED:
                self._reader = _POLL
                self._arm()

    @property
    def is_choked(self) -> bool:
        """Whether too much waits for the peer to take it."""
        return self.queued > QUEUE_BYTES

    def read_until(self, done: Callable[[], bool]) -> None:
        """Read in the calling thread until ``done()``, or for a moment.

        Returns at once where another thread reads. Where others still wait for what comes, the
        threads go on reading.
        """
        with self._state:
            if self._reader in (_TURN, _PAUSED) or self.error is not None:
                return
            polled, self._reader = self._reader == _POLL, _TURN
            if polled:
                self._arm()
        try:
            while True:
                if done():
                    break
                self._owner.on_frames(self, self._receive())
        except (BlockingIOError, InterruptedError):
            self._end_turn(_POLL)
        except (DistError, OSError) as error:
            self._end(error)
        except BaseException as error:
            # What was received in between is lost: an interrupt came.
            self._end(ConnectionAbortedError(errno.ECONNABORTED, f"the wait ended with {error!r}"))
            raise
        else:
            self._end_turn(_NOBODY)

    def ready(self, events: int) -> None:
        """Act on what the poll has found."""
        with self._state:
            self._armed = False
            mine = self._reader != _TURN and bool(events & ~select.EPOLLOUT)
            if not mine and self._pending is not None:
                mine = self._reader == _POLL and self._pending() > 0
            if mine:
                self._reader = _TURN
            elif self.fd >= 0 and self.queued and not events & select.EPOLLOUT:
                self._arm()
        if events & select.EPOLLOUT and self.queued:
            self._go_on_sending()
        if mine:
            self._take_turn(self._receive_now)
        else:
            with self._state:
                self._arm_again()

    def look(self) -> bool:
        """Look whether another request comes soon, and act on it."""
        if self.outgoing or not self._look_out.looks:
            return False
        with self._state:
            if self._reader != _POLL or self.error is not None:
                return False
            self._reader = _TURN
            self._arm()
        return self._take_turn(self._receive_soon)

    def _take_turn(self, receive: Callable[[], list[Frame] | None]) -> bool:
        """Receive and act on it; False if nothing came."""
        frames: list[Frame] | None = None
        goes_on = True
        try:
            frames = receive()
            if frames is not None:
                goes_on = self._owner.on_frames(self, frames)
            while goes_on and self._frames.may_have_more:
                goes_on = self._owner.on_frames(self, self._receive_now())
        except (BlockingIOError, InterruptedError):
            self._end_turn(_POLL)
        except (DistError, OSError) as error:
            self._end(error)
        else:
            self._end_turn(_POLL if goes_on else _PAUSED)
        return frames is not None

    def _receive(self) -> list[Frame]:
        found = self._receive_soon() if self._look_out.looks else None
        return self._frames.receive(self._sock) if found is None else found

    def _receive_now(self) -> list[Frame]:
        return self._frames.receive(self._sock, _AT_ONCE)

    def _receive_soon(self) -> list[Frame] | None:
        """Return what comes within a moment, None if nothing does."""
        if not self._look_out.until(self._finds):
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
            with self._room.lock:
                self._room.notify_all()
        if done:
            self.resume()

    def _end_turn(self, reader: int) -> None:
        with self._state:
            # Who has sent a request in the meantime has put it there before, and saw this turn.
            if reader == _NOBODY and (self.calls or not self.outgoing):
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
        events = 0 if self._reader in (_TURN, _PAUSED) else select.EPOLLRDHUP
        if self._reader == _POLL:
            events |= select.EPOLLIN
            if self._pending is not None and self._pending():
                events |= select.EPOLLOUT  # which there is at once
        if self.queued:
            events |= select.EPOLLOUT
        return events

    def _arm(self) -> None:
        if self.fd >= 0:
            self._armed = True
            self._threads.arm(self, self._events())

    def _arm_again(self) -> None:
        """Arm it if an event has disarmed it. Not in a turn, unless bytes are to be sent."""
        if not self._armed and (self._reader != _TURN or self.queued):
            self._arm()

    # ------------------------------------------------------------------ memory

    def fetch(self, frame: Frame) -> list[memoryview]:
        """Return the buffers of ``frame``, those in the peer's memory copied from there.

        Raises OSError where they cannot be.
        """
        return [
            self._fetch(buffer) if buffer.memory is None else buffer.memory
            for buffer in frame.buffers
        ]

    def _fetch(self, buffer: Buffer) -> memoryview:
        if self.memory is None:
            raise OSError(errno.EPERM, "the memory of the sender cannot be read")
        into = self._owner.recycler.take(buffer.nbytes)
        self.memory.read(buffer.address, into)
        return into.data

    # ------------------------------------------------------------------ the end

    def shut(self, error: Exception) -> None:
        """End it: whoever reads notices. Any thread; never blocks."""
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
        """Close it, by the thread that reads."""
        self.error = self.error or error
        with self._sending, self._state:
            self._threads.forget(self)
            self.fd: int = -1
            self._sock.close()
            self._queue.clear()
            self.queued: int = 0
            self.lent.clear()
        with self._room.lock:
            self._room.notify_all()
        self._owner.on_end(self, self.error)
