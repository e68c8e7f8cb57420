"""A link: an ordered, reliable channel between two members of one group.

A link belongs to one (group, peer) pair, so nothing has to be demultiplexed and one slow peer
blocks nobody else. It carries frames; each begins with the call's header (``transport.call``),
which the receiver compares with its own call before it uses a byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar

from transport.call import Call, CallHeader
from transport.errors import CommunicatorTimeoutError, HeaderMismatchError

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


class Link(ABC):
    """One end of a channel to the member ``peer`` (a group rank).

    Buffers are C-contiguous memoryviews of bytes (format ``B``), used in place. One thread at a
    time uses a link. It belongs to its communicator, which alone ends it.

    Every method raises ``CommunicatorTimeoutError`` past ``call.deadline``,
    ``HeaderMismatchError`` when the peer's frame belongs to another call (its payload is then
    not in ``into``, unless documented otherwise) or has another length, ``PeerLostError`` when the
    peer's end is gone, ``CommunicatorAbortedError`` after the communicator's ``abort``.
    """

    peer: int

    eager_bytes: ClassVar[int] = -1
    """``send`` takes a frame up to this size at once, whatever the peer does, as long as it has
    received all but one of the frames before. -1: not even an empty one.
    """

    @abstractmethod
    def send(self, call: Call, data: memoryview) -> None:
        """Send one frame. Returns when ``data`` may be reused; the peer may not have it yet."""

    @abstractmethod
    def recv_into(self, call: Call, into: memoryview) -> None:
        """Receive the next frame into ``into``, whose length the frame must have exactly."""

    @abstractmethod
    def exchange(
        self,
        call: Call,
        data: memoryview,
        source: Link,
        into: memoryview,
        on_piece: OnPiece | None = None,
    ) -> None:
        """Send ``data`` here and receive from ``source`` at the same time. ``source`` is a link
        of the same communicator, maybe this one.

        Neither direction waits for the other, so a ring of exchanges cannot deadlock, however
        large the frames. ``on_piece`` lets the caller reduce what has arrived meanwhile.
        """


class QueuedLink(Link):
    """A link on which frames can leave while others are awaited, or before they have come
    themselves.
    """

    @property
    @abstractmethod
    def window(self) -> int:
        """How many bytes should be under way; 0 where the peer is near. Never changes."""

    @abstractmethod
    def relay(self, call: Call, source: Link, into: memoryview) -> None:
        """Receive the next frame of ``source``, another link of the same communicator, as
        ``recv_into`` does, and send it here as well: what has come of it, as soon as it has.
        """

    @abstractmethod
    def outbox(self, call: Call, former: Outbox | None = None) -> Outbox:
        """Return an outbox for links of the same communicator.

        Its frames follow on those of ``former``, the outbox of the call before, which has been
        given all that it gets and moves the frames of both: until ``take_over``, frames can be
        posted and expected, not waited for.
        """


class Outbox(ABC):
    """Frames of one call that leave on several links, while others come on them.

    On each link they leave in the order in which they were posted, and come in the order in which
    they are expected. It is left as a context manager: without an error when all frames have gone
    (those that are expected must have been waited for), with one at once. Raises as links do.
    """

    @abstractmethod
    def post(self, link: Link, data: memoryview) -> None:
        """Have ``data`` sent on ``link``; it must stay as it is until the outbox is left, or until
        a frame came that the peer sends only after it has this one. Never waits for the peer.
        """

    @abstractmethod
    def expect(self, link: Link, into: memoryview) -> None:
        """Have a frame of ``link``, the next behind those that are expected there already, received
        ``into`` memory as it comes, whichever frame is waited for. Never waits.
        """

    @abstractmethod
    def wait(self, link: Link, on_piece: OnPiece | None = None) -> None:
        """Wait for the first of the frames that are expected of ``link``, which is none of them
        then, while others come and leave. ``on_piece`` is told of this one, from now on.
        """

    @abstractmethod
    def while_waiting(self, let_next: Callable[[], bool]) -> None:
        """Nothing more will be posted. In each wait ask ``let_next``, which may make an outbox that
        follows on this one, until it has returned True.
        """

    @abstractmethod
    def take_over(self) -> None:
        """Go on alone: the call of the ``former`` outbox is over, and that was left. Raises what
        has befallen the frames of this one.
        """

    @abstractmethod
    def __enter__(self) -> Outbox: ...

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
