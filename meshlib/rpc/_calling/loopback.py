"""The connection of a worker with itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transport._channel.connection import ChannelConnection
from transport._channel.frames import ChannelFrame, FrameBuffer


class Loopback:
    """One end of a worker's connection with itself. Frames arrive at once, with copied buffers.

    ``deliver(connection, frame)`` handles a frame that arrives at a connection.
    """

    is_choked = False

    def __init__(
        self, rank: int, outgoing: bool, deliver: Callable[[Loopback, ChannelFrame], None]
    ) -> None:
        self.peer = rank
        self.outgoing = outgoing
        self.pending: dict[int, Any] = {}
        self._deliver = deliver
        self._other: Loopback = self

    @classmethod
    def between(cls, rank: int, deliver: Callable[[Loopback, ChannelFrame], None]) -> Loopback:
        """Return the outgoing end of a new loopback of the worker ``rank``."""
        one, other = cls(rank, True, deliver), cls(rank, False, deliver)
        one._other, other._other = other, one
        return one

    def send(
        self,
        kind: int,
        number: int,
        data: bytes = b"",
        buffers: Sequence[memoryview] = (),
        flags: int = 0,
    ) -> None:
        """Deliver a frame to the other end."""
        copies = [FrameBuffer(b.nbytes, 0, memoryview(bytearray(b))) for b in buffers]
        self._deliver(self._other, ChannelFrame(kind, flags, number, data, copies))

    def fetch(self, frame: ChannelFrame) -> list[memoryview]:
        """Return the buffers of a frame."""
        return [buffer.memory for buffer in frame.buffers if buffer.memory is not None]

    def acknowledge(self, frame: ChannelFrame) -> None:
        """Do nothing: buffers are copied."""

    def reclaim(self, number: int) -> None:
        """Do nothing: buffers are copied."""

    def poll(self) -> None:
        """Do nothing: frames arrive at once."""

    def read_until(self, done: Callable[[], bool]) -> None:
        """Do nothing: frames arrive at once."""

    def wait_for_room(self, timeout: float | None) -> None:
        """Do nothing: frames arrive at once."""


AnyConnection = ChannelConnection | Loopback
