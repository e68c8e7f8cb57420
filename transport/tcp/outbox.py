"""Frames that leave on several connections while others are received."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from transport.call import Call
from transport.link import Link, OnPiece, Outbox
from transport.tcp.frame import NOW, STEP_BYTES, Outgoing
from transport.tcp.waiting import poll

if TYPE_CHECKING:
    from transport.tcp.link import TcpLink


class TcpOutbox(Outbox):
    """An outbox for ``TcpLink``s. It holds each link that it was given until it is left."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._held: set[TcpLink] = set()
        # Only links with frames that are still to leave.
        self._leaving: dict[TcpLink, deque[Outgoing]] = {}

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

    def receive(self, link: Link, into: memoryview, on_piece: OnPiece | None = None) -> None:
        link, call = self._hold(link), self._call
        call.waiting_for = link.peer
        incoming = link.arrival(call, into)
        try:
            while self._leaving:
                moved = False
                for other in list(self._leaving):
                    moved |= self._push(other)
                moved |= link.pull(incoming, NOW, STEP_BYTES)
                if on_piece is not None and incoming.received:
                    on_piece(incoming.received)
                if incoming.done:
                    return
                if not moved:
                    poll(call, self._first(), (link, incoming))
            link.receive(call, incoming, on_piece)
        except BaseException:
            link.give_up(None, incoming)
            raise

    def _hold(self, link: Link) -> TcpLink:
        held: TcpLink = link  # pyright: ignore[reportAssignmentType]  (of the same communicator)
        if held not in self._held:
            self._held.add(held)
            held.enter(self._call)
        return held

    def _first(self) -> dict[TcpLink, Outgoing]:
        return {link: queue[0] for link, queue in self._leaving.items()}

    def _push(self, link: TcpLink) -> bool:
        """Send what fits of the first frame, or a step; return whether anything was sent."""
        queue = self._leaving[link]
        if not link.push(queue[0]):
            return False
        if queue[0].done:
            queue.popleft()
            if not queue:
                del self._leaving[link]
        return True

    def _finish(self) -> None:
        while self._leaving:
            moved = [self._push(link) for link in list(self._leaving)]
            if not any(moved):
                self._call.waiting_for = next(iter(self._leaving)).peer
                poll(self._call, self._first(), None)

    def _give_up(self) -> None:
        for link, queue in self._leaving.items():
            link.give_up(queue[0], None)
        self._leaving.clear()
