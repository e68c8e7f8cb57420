"""Frames that leave on several connections while others come on them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from transport.call import Call
from transport.errors import CommunicatorAbortedError
from transport.link import Link, OnPiece, Outbox
from transport.tcp.frame import NOW, STEP_BYTES, Incoming, Outgoing
from transport.tcp.waiting import poll

if TYPE_CHECKING:
    from transport.tcp.link import TcpLink

_Frame = TypeVar("_Frame")


class _Leaving(dict["TcpLink", deque[Outgoing]]):
    """The frames of a call that are still to leave, by link, and those of the next one behind them
    if the two overlap.
    """

    lost: Exception | None = None
    """What has befallen a frame of the later call: for that one to raise."""
    broken: str | None = None
    """What one of the two has failed with, and so both."""


class TcpOutbox(Outbox):
    """An outbox for ``TcpLink``s. It holds each link that it was given until it is left.

    All connections are served by turns, whichever frame is waited for: a peer whose frames nobody
    reads would find its window closed, and its kernel would take the way for a slow one.
    """

    def __init__(self, call: Call, former: TcpOutbox | None = None) -> None:
        self._call = call
        self._held: set[TcpLink] = set()
        self._leaving = _Leaving() if former is None else former._leaving
        # The former one holds the links that this one uses, until it has taken over.
        self._leads = former is None
        # Only links with frames that are to come.
        self._coming: dict[TcpLink, deque[Incoming]] = {}
        # Of those posted, the last one of each link.
        self._posted: dict[TcpLink, Outgoing] = {}
        # What was expected and not yet waited for, come or not.
        self._expected: defaultdict[TcpLink, deque[Incoming]] = defaultdict(deque)
        self._let_next: Callable[[], bool] | None = None

    def __enter__(self) -> TcpOutbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        except BaseException as late:
            self._give_up(late)
            raise
        else:
            if error is not None:
                self._give_up(error)
        finally:
            for link in self._held:
                link.leave()
            self._held.clear()
            # What is to be asked knows this, and frames know arrays: no cycle keeps them alive.
            self._let_next = None
            self._posted.clear()
            self._expected.clear()

    def post(self, link: Link, data: memoryview) -> None:
        link = self._hold(link)
        outgoing = self._posted[link] = link.departure(self._call, data)
        leaving = self._leaving
        queue = leaving.get(link)
        if queue is not None:
            queue.append(outgoing)
            return
        while not outgoing.done and link.push(outgoing):
            pass
        if not outgoing.done:
            leaving[link] = deque((outgoing,))

    def expect(self, link: Link, into: memoryview) -> None:
        link = self._hold(link)
        incoming = link.arrival(self._call, into)
        self._expected[link].append(incoming)
        if self._leads:  # else those of the former call come first, which may expect some yet
            self._coming.setdefault(link, deque()).append(incoming)

    def wait(self, link: Link, on_piece: OnPiece | None = None) -> None:
        link, call = self._hold(link), self._call
        call.waiting_for = link.peer
        incoming = self._expected[link].popleft()
        leaving, coming = self._leaving, self._coming
        ready = {*leaving, *coming}
        while True:
            if self._let_next is not None and self._let_next():
                self._let_next = None
                ready = {*leaving, *coming}
            self._check_unbroken()
            alone = not leaving and coming.keys() == {link}
            if alone and not incoming.done:
                link.receive(call, incoming, on_piece)
                self._note_come(link)
                return
            moved = self._serve(ready)
            if on_piece is not None and incoming.received:
                on_piece(incoming.received)
            if incoming.done:
                return
            ready = moved or poll(call, _first(leaving), _first(coming), link)

    def while_waiting(self, let_next: Callable[[], bool]) -> None:
        self._let_next = let_next

    def take_over(self) -> None:
        self._leads = True
        self._check_unbroken()
        for link in self._posted:
            self._hold(link)
        for link, frames in self._expected.items():
            self._coming[self._hold(link)] = deque(frames)
        if self._leaving.lost is not None:
            raise self._leaving.lost

    def _check_unbroken(self) -> None:
        error = self._leaving.broken
        if error is not None:
            raise CommunicatorAbortedError(f"a call that overlaps with this one failed: {error}")

    def _hold(self, link: Link) -> TcpLink:
        held: TcpLink = link  # pyright: ignore[reportAssignmentType]  (of the same communicator)
        if self._leads and held not in self._held:
            self._held.add(held)
            held.enter(self._call)
        return held

    def _serve(self, ready: set[TcpLink]) -> set[TcpLink]:
        """Move a step of the first frames of these links, each way; return where one moved."""
        moved = {link for link in ready if link in self._leaving and self._push(link)}
        for link in ready:
            if link in self._coming and link.pull(self._coming[link][0], NOW, STEP_BYTES):
                self._note_come(link)
                moved.add(link)
        return moved

    def _push(self, link: TcpLink) -> bool:
        queue = self._leaving[link]
        try:
            if not link.push(queue[0]):
                return False
        except Exception as error:
            last = self._posted.get(link)
            if last is not None and not last.done:
                raise
            self._leaving.lost = error
            del self._leaving[link]
            return True
        if queue[0].done:
            queue.popleft()
            if not queue:
                del self._leaving[link]
        return True

    def _note_come(self, link: TcpLink) -> None:
        """Go over to the next frame of a link if the first one is there."""
        queue = self._coming[link]
        if queue[0].done:
            queue.popleft()
            if not queue:
                del self._coming[link]

    def _finish(self) -> None:
        """Wait until all frames of this call have left."""
        assert not self._coming, "frames are expected that nobody waits for"
        while any(not outgoing.done for outgoing in self._posted.values()):
            self._check_unbroken()
            moved = [self._push(link) for link in list(self._leaving)]
            if not any(moved):
                self._call.waiting_for = next(iter(self._leaving)).peer
                poll(self._call, _first(self._leaving), {}, None)

    def _give_up(self, error: BaseException) -> None:
        if self._leaving.broken is None:
            self._leaving.broken = f"{type(error).__name__}: {error}"
        if not self._leads:
            return  # whose turn it is gives up both
        for link, frames in self._leaving.items():
            link.give_up(frames[0], None)
        for link, frames in self._coming.items():
            link.give_up(None, frames[0])
        self._leaving.clear()
        self._coming.clear()


def _first(queues: dict[TcpLink, deque[_Frame]]) -> dict[TcpLink, _Frame]:
    return {link: queue[0] for link, queue in queues.items()}
