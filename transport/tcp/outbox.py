"""Frames that leave on several connections while others come on them."""

from __future__ import annotations

from collections import defaultdict, deque
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from transport.call import Call
from transport.link import Link, OnPiece, Outbox
from transport.tcp.frame import NOW, STEP_BYTES, Incoming, Outgoing
from transport.tcp.waiting import poll

if TYPE_CHECKING:
    from transport.tcp.link import TcpLink

_Frame = TypeVar("_Frame")


class TcpOutbox(Outbox):
    """An outbox for ``TcpLink``s. It holds each link that it was given until it is left.

    All connections are served by turns, whichever frame is waited for: a peer whose frames nobody
    reads would find its window closed, and its kernel would take the way for a slow one.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._held: set[TcpLink] = set()
        # Only links with frames that are still to leave, or to come.
        self._leaving: dict[TcpLink, deque[Outgoing]] = {}
        self._coming: dict[TcpLink, deque[Incoming]] = {}
        # What was expected and not yet waited for, come or not.
        self._expected: defaultdict[TcpLink, deque[Incoming]] = defaultdict(deque)

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
        except BaseException:
            self._give_up()
            raise
        else:
            if error is not None:
                self._give_up()
        finally:
            for link in self._held:
                link.leave()
            self._held.clear()

    def post(self, link: Link, data: memoryview) -> None:
        link = self._hold(link)
        outgoing = link.departure(self._call, data)
        queue = self._leaving.get(link)
        if queue is not None:
            queue.append(outgoing)
            return
        while not outgoing.done and link.push(outgoing):
            pass
        if not outgoing.done:
            self._leaving[link] = deque((outgoing,))

    def expect(self, link: Link, into: memoryview) -> None:
        link = self._hold(link)
        incoming = link.arrival(self._call, into)
        self._coming.setdefault(link, deque()).append(incoming)
        self._expected[link].append(incoming)

    def wait(self, link: Link, on_piece: OnPiece | None = None) -> None:
        link, call = self._hold(link), self._call
        call.waiting_for = link.peer
        incoming = self._expected[link].popleft()
        ready = {*self._leaving, *self._coming}
        while True:
            alone = not self._leaving and self._coming.keys() == {link}
            if alone and not incoming.done:
                link.receive(call, incoming, on_piece)
                self._note_come(link)
                return
            moved = self._serve(ready)
            if on_piece is not None and incoming.received:
                on_piece(incoming.received)
            if incoming.done:
                return
            ready = moved or poll(call, _first(self._leaving), _first(self._coming), link)

    def _hold(self, link: Link) -> TcpLink:
        held: TcpLink = link  # pyright: ignore[reportAssignmentType]  (of the same communicator)
        if held not in self._held:
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
        if not link.push(queue[0]):
            return False
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
        assert not self._coming, "frames are expected that nobody waits for"
        while self._leaving:
            moved = [self._push(link) for link in list(self._leaving)]
            if not any(moved):
                self._call.waiting_for = next(iter(self._leaving)).peer
                poll(self._call, _first(self._leaving), {}, None)

    def _give_up(self) -> None:
        for link, frames in self._leaving.items():
            link.give_up(frames[0], None)
        for link, frames in self._coming.items():
            link.give_up(None, frames[0])
        self._leaving.clear()
        self._coming.clear()


def _first(queues: dict[TcpLink, deque[_Frame]]) -> dict[TcpLink, _Frame]:
    return {link: queue[0] for link, queue in queues.items()}
