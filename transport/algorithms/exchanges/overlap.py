"""Calls that overlap: on links with delay, one begins to send when the one before has no more to.

At the end of a call nothing is left to send, but half a round trip passes until all has come. The
frames of the next call, which follow on the same links, can leave meanwhile: as many as a call
sends ahead of what it has received. It takes no frame before the first call has all of its own, so
on each link frames pass in the order of the calls, and the other end need not do the same. Their
headers are compared as ever. Two calls overlap at most, where neither works on the other's memory.

Which do is another matter on each rank, and depends on when they are issued; bits do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from transport.call import Call
from transport.communicators.base import Turns
from transport.link import Link, Outbox, QueuedLink
from transport.operands.quiet import Run, quiet_runner
from transport.operands.reduce_op import Flat

MOST_BEHIND = 2 << 20
"""The most bytes of input that the later call has for a member. Nobody reads them before the first
call is over: of many, the receiver's kernel would close the window.
"""

_Span = tuple[int, int]


class Overlap:
    """Which calls of a communicator of ``size`` members overlap: none before ``begin``.

    The methods are for the thread whose turn it is. Each call of the communicator begins with
    ``enter`` or with ``settle``.
    """

    def __init__(self, size: int) -> None:
        self.turns: Turns | None = None
        """How the calls follow each other; None: each ends before the next begins."""
        self._begun = False
        self._most = MOST_BEHIND * size
        # Of the call that lets the next begin, until that waits for its end.
        self._former: Outbox | None = None
        # The memory of that call, and of the one under way; None where that overlaps with none.
        self._taken: list[_Span] = []
        self._memory: list[_Span] | None = None
        # What the one under way has entered with, until it has an outbox: others need no spans.
        self._buffers: Sequence[Flat] = ()
        self.odd: bool = False
        """It is so for one of two calls that overlap, each of which needs things of its own."""

    @cached_property
    def _run_odd(self) -> Run:
        return quiet_runner()

    def begin(self) -> None:
        """Be told that there is delay on some link: calls overlap from the next one on, where they
        take turns. Again and again, maybe; each member on its own.
        """
        if not self._begun and self.turns is not None:
            self.turns.note_overlapping()
            self._begun = True

    def await_former(self) -> None:
        """Wait for the end of the call before this one."""
        if self._former is not None and self.turns is not None:
            self.turns.await_former()

    def settle(self) -> None:
        """Begin a call that does not overlap: wait for the end of the one before it."""
        if self._former is not None:
            self.await_former()
        self._memory = None
        self._buffers = ()

    def enter(self, buffers: Sequence[Flat]) -> None:
        """Begin a call that works on ``buffers``, unless the one before it works on them, too: then
        wait for its end.
        """
        if not self._begun:
            return
        if self._former is not None and _overlap(_spans(buffers), self._taken):
            self.await_former()
        self._buffers = buffers

    def runner(self, usual: Run) -> Run:
        """Return what the call that has entered runs arithmetic with: another one in odd calls."""
        return self._run_odd if self.odd else usual

    def outbox(self, call: Call, links: Sequence[Link]) -> Outbox:
        """Return an outbox over ``links`` for the call that has entered, or has settled."""
        link = links[0]
        assert isinstance(link, QueuedLink)
        if self._buffers:
            self._memory, self._buffers = _spans(self._buffers), ()
        return link.outbox(call, self._former)

    def take_over(self, outbox: Outbox) -> None:
        """Go on when the call before this one, whose outbox this one may share, is over: what can
        be sent before has been posted.
        """
        if self._former is not None:
            self.await_former()
            outbox.take_over()

    def note_all_posted(self, outbox: Outbox) -> None:
        """Let the next call begin, from now on: all that is to be sent has been posted."""
        if self._begun:
            outbox.while_waiting(lambda: self.let_next(outbox))

    def let_next(self, outbox: Outbox) -> bool:
        """Have the next call begin, if one is due; return whether one has. ``outbox`` has been
        given all that it gets.
        """
        if self._memory is None or self.turns is None:
            return False
        self._former, self._taken = outbox, self._memory
        self.odd = not self.odd
        begun = self.turns.begin_next(self._most)
        if not begun:
            self.odd = not self.odd
        self._former = None
        return begun


def _spans(buffers: Sequence[Flat]) -> list[_Span]:
    begins = [buffer.ctypes.data for buffer in buffers]
    return [(at, at + buffer.nbytes) for at, buffer in zip(begins, buffers, strict=True)]


def _overlap(some: list[_Span], others: list[_Span]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
