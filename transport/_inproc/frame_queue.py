"""Queues of frames from one thread to another."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from transport._calls.call import Call
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition

HIGH_WATER = 1 << 20
"""The maximum bytes in a queue; further frames are lent."""
_FRAME_COST = 64
"""The bytes that each frame counts in addition to its data, to bound the number of empty frames."""


class FrameQueueCut(Exception):
    """An end of the queue was aborted or closed."""


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """A frame in a queue; ``lent`` if ``data`` is the sender's own memory."""

    packed: bytes
    tag: int
    data: memoryview
    lent: bool
    started: bool = False
    taken: bool = False


class FrameQueue:
    """A queue of frames from one member to another.

    Methods raise ``FrameQueueCut`` once one end is aborted or closed.
    """

    def __init__(self, eager: int) -> None:
        self._eager = eager
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        self._frames: deque[QueuedFrame] = deque()
        self._queued = 0
        self._cut = False
        self._sender_left = False
        self._receiver_left = False

    def offer(self, call: Call, data: memoryview, tag: int = 0) -> QueuedFrame:
        """Queue a frame without waiting. The caller must call ``wait_taken`` for a lent frame."""
        with self._lock:
            if self._cut or self._receiver_left:
                raise FrameQueueCut
            cost = data.nbytes + _FRAME_COST
            lent = data.nbytes > self._eager or self._queued + cost > HIGH_WATER
            frame = QueuedFrame(call.packed, tag, data if lent else memoryview(bytes(data)), lent)
            if not lent:
                self._queued += cost
            self._frames.append(frame)
            self._changed.notify_all()
            return frame

    def wait_taken(self, frame: QueuedFrame, deadline: Deadline) -> bool:
        """Wait until a lent frame has been copied; past the deadline, withdraw it, return False."""
        with self._lock:
            while True:
                if frame.taken:
                    return True
                # While the receiver copies, the sender must not return, even after an error.
                if not frame.started and (self._cut or self._receiver_left):
                    raise FrameQueueCut
                if frame.started:
                    self._changed.wait()
                    continue
                arrived = self._changed.wait(deadline.remaining())
                if not arrived and deadline.expired and not frame.started:
                    self._frames.remove(frame)
                    return False

    def begin_take(
        self, deadline: Deadline, packed: bytes = b"", tag: int = 0
    ) -> QueuedFrame | None:
        """Return the next frame of the call ``packed`` with ``tag``, or None past the deadline.

        Also returns a frame of another call, because the awaited frame then cannot follow.
        """
        with self._lock:
            while True:
                if self._cut:
                    raise FrameQueueCut
                for frame in self._frames:
                    if frame.tag == tag or frame.packed != packed:
                        self._frames.remove(frame)
                        frame.started = True
                        return frame
                if self._sender_left:
                    raise FrameQueueCut
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    return None

    def end_take(self, frame: QueuedFrame) -> None:
        """Mark a frame from ``begin_take`` as copied, so that its sender may reuse the memory."""
        with self._lock:
            frame.taken = True
            if frame.lent:
                self._changed.notify_all()
            else:
                self._queued -= frame.data.nbytes + _FRAME_COST

    def cut(self) -> None:
        """Abort the queue and wake both ends. No queued frame is received."""
        with self._lock:
            self._cut = True
            self._changed.notify_all()

    def leave(self, as_sender: bool) -> None:
        """Close one end. Frames that it sent earlier can still be received."""
        with self._lock:
            if as_sender:
                self._sender_left = True
            else:
                self._receiver_left = True
            self._changed.notify_all()
