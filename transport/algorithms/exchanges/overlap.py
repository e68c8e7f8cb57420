"""Calls that overlap: on links with delay, the next one begins to send when one has sent all it has.

At the end of a call nothing is left to send, but a round trip passes until all has come. The frames
of the next call, which follow on the same links, can leave meanwhile: as many as a call sends ahead
of what it has received. It takes no frame before the first call has all of its own, so on each link
frames pass in the order of the calls, and the other end need not do the same. Their headers are
compared as ever.

Who overlaps differs by rank, and depends on when calls are issued; bits and order do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.call import Call
from transport.link import Link, Outbox, PacedLink
from transport.operands.reduce_op import Flat
from transport.turns import Turns

_Span = tuple[int, int]


class Overlap:
    """Which calls of a communicator overlap. The methods are for the thread whose turn it is.

    Each call of the communicator begins with ``enter`` or with ``settle``.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        # Of the call that lets the next begin, until that waits for its end.
        self._former: Outbox | None = None
        # Of that call, and of the one under way; None where that is to overlap with none.
        self._taken: list[_Span] = []
        self._memory: Sequence[Flat] | None = None
        self.odd: bool = False
        """Of two calls that overlap, it is so for one: what each needs for itself is there twice."""

    def await_former(self) -> None:
        """Wait for the end of the call before this one."""
        if self._former is not None:
            self._turns.await_former()

    def settle(self) -> None:
        """Begin a call that does not overlap: wait for the end of the one before it."""
        self.await_former()
        self._memory = None

    def enter(self, buffers: Sequence[Flat]) -> None:
        """Begin a call that works on ``buffers``, unless the one before it works on them, too: then
        wait for its end.
        """
        if self._former is not None and _overlap(_spans(buffers), self._taken):
            self.await_former()
        self._memory = buffers

    def outbox(self, call: Call, link: PacedLink) -> Outbox:
        """Return an outbox for the call that has entered."""
        return link.outbox(call, self._former)

    def take_over(self, outbox: Outbox) -> None:
        """Go on when the call before this one, whose outbox this one may share, is over."""
        if self._former is not None:
            self._turns.await_former()
            outbox.take_over()

    def let_next(self, outbox: Outbox) -> bool:
        """Have the next call begin, if one is due; return whether one has. ``outbox`` has been
        given all that it gets.
        """
        if self._memory is None:
            return False
        self._former, self._taken = outbox, _spans(self._memory)
        self.odd = not self.odd
        begun = self._turns.begin_next()
        if not begun:
            self.odd = not self.odd
        self._former = None
        return begun


def outbox_of(overlap: Overlap | None, call: Call, links: Sequence[Link]) -> Outbox:
    """Return an outbox for the call that has entered."""
    link = links[0]
    assert isinstance(link, PacedLink)
    return link.outbox(call) if overlap is None else overlap.outbox(call, link)


def take_over(overlap: Overlap | None, outbox: Outbox) -> None:
    """Go on when the call before this one is over: what can be sent before has been posted."""
    if overlap is not None:
        overlap.take_over(outbox)


def note_all_posted(overlap: Overlap | None, outbox: Outbox) -> None:
    """Let the next call begin, from now on: all that is to be sent has been posted."""
    if overlap is not None:
        outbox.while_waiting(lambda: overlap.let_next(outbox))


def _spans(buffers: Sequence[Flat]) -> list[_Span]:
    begins = [buffer.ctypes.data for buffer in buffers]
    return [(at, at + buffer.nbytes) for at, buffer in zip(begins, buffers, strict=True)]


def _overlap(some: list[_Span], others: list[_Span]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
