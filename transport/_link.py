"""A link: an ordered, reliable channel between two members of one group.

A link belongs to one (group, peer) pair: frames need no demultiplexing, and a slow peer does not
block other links. Each frame begins with the call's header (``transport._calls.header``). The
receiver compares it with its own call before it uses the payload.

Algorithms post a frame once its data is ready, and wait for the frames that they need. A thread
that waits for one frame makes progress on all frames that its communicator has posted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from transport._calls.call import Call
from transport._calls.header import CallHeader
from transport._errors import CommunicatorTimeoutError, HeaderMismatchError

OnPiece = Callable[[int], None]
"""Called while a frame arrives, with the number of its bytes in the buffer so far."""


def wrong_frame(
    call: Call, expected: int, peer: int, name: str, header: CallHeader, size: int
) -> HeaderMismatchError:
    """Return the error for a frame of a call other than ``call``, or not of ``expected`` bytes.

    ``peer`` sent the frame, with ``header`` and ``size`` bytes; ``name`` is the peer's name in the
    message.
    """
    if header == call.header:
        text = f"{name} sent {size} bytes, this rank expected {expected}; both are in {header}"
    else:
        text = f"this rank is in {call.header}, {name} in {header}"
    return HeaderMismatchError(text, peer, call.header, header)


def waited_for(call: Call, peer: int, name: str, what: str) -> CommunicatorTimeoutError:
    """Return the error for a ``call`` that timed out waiting for ``peer``.

    The message contains the peer's ``name`` and what it had to do: ``what`` ("to send data").
    """
    return CommunicatorTimeoutError(
        f"{call.header}: waited {call.deadline.seconds:g} s for {name} {what}", peer
    )


class Request(ABC):
    """A frame that was posted on a link."""

    __slots__ = ("done",)

    done: bool
    """True once a sent frame's memory may be reused, or a received frame has arrived."""

    @abstractmethod
    def wait(self, on_piece: OnPiece | None = None) -> None:
        """Make progress until the request is done; raise the errors of ``Link``.

        ``on_piece`` is called for each further piece of a received frame.
        """


class Link(ABC):
    """One end of a channel to the member ``peer`` (a group rank).

    Buffers are C-contiguous memoryviews of bytes (format ``B``), used in place. One thread at a
    time uses a link. Only its communicator closes it.

    Every method, and ``Request.wait``, may raise one of these errors. They withdraw all requests
    of the call:

    - ``CommunicatorTimeoutError`` past ``call.deadline``
    - ``HeaderMismatchError`` if the peer's frame has another length or belongs to another call.
      Its payload is then not in ``into``, unless documented otherwise
    - ``PeerLostError`` if the peer's end is closed
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
        """Receive the call's next frame with ``tag``, of exactly the length of ``into``.

        Never waits. Frames of one tag arrive in the order in which they were posted. Before this
        rank waits for any frame of the link, it must post the receive of the peer's next frame.
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
    """Send ``data`` on ``onward`` while receiving ``into`` on ``behind``, perhaps the same link.

    Neither direction waits for the other, so a ring of exchanges cannot deadlock, however large
    the frames. With ``on_piece``, the caller can reduce bytes as they arrive.
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
