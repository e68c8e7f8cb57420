"""Frames from one thread to another."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from transport._calls.call import Call
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition

HIGH_WATER = 1 << 20
"""The bytes that a queue holds; further frames are lent."""
_FRAME_COST = 64
"""A frame's share of the queue's limit besides its data: it bounds empty frames as well."""


class FrameQueueCut(Exception):
    """An end of the queue was aborted or closed."""


@dataclass(slots=True, eq=False)
class QueuedFrame:
    """A frame in a queue; ``lent`` when ``data`` is the sender's own memory."""

    packed: bytes
    tag: int
    data: memoryview
    lent: bool
    started: bool = False
    taken: bool = False


class FrameQueue:
    """Frames from one member to another. Methods raise ``FrameQueueCut`` once an end is gone."""

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
        """Queue a frame without waiting. One that is lent must be awaited with ``wait_taken``."""
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
        """Wait until a lent frame has been copied; past the deadline withdraw it, return False."""
        with self._lock:
            while True:
                if frame.taken:
                    return True
                # While the receiver copies, the memory must stay as it is, whatever happens.
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
        """Wait for the next frame of the call ``packed`` with ``tag``; None past the deadline.

        Also returns a frame of another call: then the awaited one does not follow.
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
        """Give the frame's memory back to its sender."""
        with self._lock:
            frame.taken = True
            if frame.lent:
                self._changed.notify_all()
            else:
                self._queued -= frame.data.nbytes + _FRAME_COST

    def cut(self) -> None:
        """Wake both ends; nothing more arrives."""
        with self._lock:
            self._cut = True
            self._changed.notify_all()

    def leave(self, as_sender: bool) -> None:
        """Let one end go; what it sent before still arrives."""
        with self._lock:
            if as_sender:
                self._sender_left = True
            else:
                self._receiver_left = True
            self._changed.notify_all()
