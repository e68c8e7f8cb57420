"""A link: an ordered, reliable channel between two members of one group.

A link belongs to one (group, peer) pair, so nothing has to be demultiplexed and one slow peer
blocks nobody else. It carries frames; each begins with the call's header
(``transport._calls.header``), which the receiver compares with its own call before it uses a byte.

Algorithms post the frames whose data is there and wait for those that they need. A thread that
waits for one frame makes progress on all frames that its communicator has posted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from transport._calls.call import Call
from transport._calls.header import CallHeader
from transport._errors import CommunicatorTimeoutError, HeaderMismatchError

OnPiece = Callable[[int], None]
"""Told, while a frame arrives, how many of its bytes are in the buffer so far (rising)."""


def wrong_frame(
    call: Call, expected: int, peer: int, name: str, header: CallHeader, size: int
) -> HeaderMismatchError:
    """Return the error for a frame that is not the one of ``call`` with ``expected`` bytes.

    ``header`` and ``size`` are those of the frame, which ``peer`` sent; ``name`` is what messages
    call it.
    """
    if header == call.header:
        text = f"{name} sent {size} bytes, this rank expected {expected}; both are in {header}"
    else:
        text = f"this rank is in {call.header}, {name} in {header}"
    return HeaderMismatchError(text, peer, call.header, header)


def waited_for(call: Call, peer: int, name: str, what: str) -> CommunicatorTimeoutError:
    """Return the error for a ``call`` whose deadline passed before ``peer``, called ``name``, came
    to do ``what`` ("to send data").
    """
    return CommunicatorTimeoutError(
        f"{call.header}: waited {call.deadline.seconds:g} s for {name} {what}", peer
    )


class Request(ABC):
    """A frame that was posted on a link."""

    __slots__ = ("done",)

    done: bool
    """True if a sent frame's memory may be reused, or a received frame is in its memory."""

    @abstractmethod
    def wait(self, on_piece: OnPiece | None = None) -> None:
        """Make progress until the request is done; raises the errors of ``Link``.

        From now on ``on_piece`` is called for each piece of a received frame.
        """


class Link(ABC):
    """One end of a channel to the member ``peer`` (a group rank).

    Buffers are C-contiguous memoryviews of bytes (format ``B``), used in place. One thread at a
    time uses a link. It belongs to its communicator, which alone ends it.

    Every method, and ``Request.wait``, raises one of these errors, which withdraws everything that
    the call has posted:

    - ``CommunicatorTimeoutError`` past ``call.deadline``
    - ``HeaderMismatchError`` when the peer's frame has another length or belongs to another call.
      Its payload is then not in ``into``, unless documented otherwise
    - ``PeerLostError`` when the peer's end is gone
    - ``CommunicatorAbortedError`` after the communicator's ``abort``
    """

    peer: int

    window: int = 0
    """The bytes to keep in flight to a distant peer; 0 for a near one."""

    @abstractmethod
    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> Request:
        """Send one frame; ``data`` must not change until the request is done. Never waits."""

    @abstractmethod
    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> Request:
        """Receive the call's next frame with ``tag`` into ``into``, whose length the frame must
        have exactly. Never waits.

        Frames of one tag come in the order in which they were posted. The peer's next frame must
        be one that is posted by the time this rank waits for any frame of the link.
        """

    def send(self, call: Call, data: memoryview) -> None:
        """Send one frame. Returns when ``data`` may be reused; the peer may not have it yet."""
        self.post_send(call, data).wait()

    def recv_into(self, call: Call, into: memoryview) -> None:
        """Receive the next frame into ``into``."""
        self.post_recv(call, into).wait()


def exchange(
    call: Call,
    onward: Link,
    data: memoryview,
    behind: Link,
    into: memoryview,
    on_piece: OnPiece | None = None,
) -> None:
    """Send ``data`` on one link while receiving ``into`` from another one, or the same.

    Neither direction waits for the other, so a ring of exchanges cannot deadlock, however large
    the frames. ``on_piece`` lets the caller reduce the bytes that have arrived meanwhile.
    """
    received = behind.post_recv(call, into)
    sent = onward.post_send(call, data)
    received.wait(on_piece)
    sent.wait()


def wait_all(requests: Iterable[Request]) -> None:
    """Wait until all ``requests`` are done."""
    for request in requests:
        if not request.done:
            request.wait()
