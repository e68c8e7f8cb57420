"""Links that say they have delay, and have none: what is sent ahead on them is sent for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transport._calls.call import Call
from transport._inproc.communicator import InprocCommunicator, InprocLink
from transport._link import OnPiece, Request
from transport._tcp import TcpCommunicator
from transport._tcp.link import TcpLink


class FarTcpCommunicator(TcpCommunicator):
    """Each member takes its links for something else; each sends another number of laps ahead."""

    def link(self, peer: int, call: Call) -> TcpLink:
        link = super().link(peer, call)
        link.window = (1 << 16) * (1 + self.rank % 3)
        return link


class FarLink(InprocLink):
    """A link between threads, with a window of the test's. ``log`` has what was done with it: what
    (post, expect, receive), the peer, the bytes.
    """

    log: list[Any]

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> Any:
        self.log.append(("post", self.peer, data.nbytes))
        return super().post_send(call, data, tag)

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> Any:
        self.log.append(("expect", self.peer, into.nbytes))
        request = Watched(super().post_recv(call, into, tag))
        request.on_done = lambda: self.log.append(("receive", self.peer, into.nbytes))
        return request


class Watched(Request):
    """A request that tells of its end."""

    def __init__(self, inner: Request) -> None:
        self._inner = inner
        self.on_done: Callable[[], object] = lambda: None
        self.done = False

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self._inner.wait(on_piece)
            self.done = True
            self.on_done()


class FarInprocCommunicator(InprocCommunicator):
    """Threads whose links have the window ``window_of(rank, peer)``; ``log`` is of all its links,
    and ``used`` has the peers of those that it was asked for.
    """

    def __init__(self, membership: Any, table: Any, window_of: Any) -> None:
        super().__init__(membership, table)
        self._window_of = window_of
        self.log: list[Any] = []
        self.used: set[int] = set()

    def link(self, peer: int, call: Call) -> InprocLink:
        self.used.add(peer)
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = FarLink(self, peer)
            link.window = self._window_of(self.rank, peer)
            link.log = self.log
        return link
