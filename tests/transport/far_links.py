"""Links that say they have delay, and have none: what is sent ahead on them is sent for nothing."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from transport.call import Call
from transport.inproc import InprocCommunicator, InprocLink
from transport.link import Link, OnPiece, Outbox, QueuedLink
from transport.tcp import TcpCommunicator
from transport.tcp.link import TcpLink


class FarTcpCommunicator(TcpCommunicator):
    """Each member takes its links for something else; together they send a few laps ahead."""

    def link(self, peer: int, call: Call) -> TcpLink:
        link = super().link(peer, call)
        link.distance.window = 100 * (1 + self.rank % 3)
        return link


class _InprocOutbox(Outbox):
    def __init__(self, call: Call, log: list[Any]) -> None:
        self._call = call
        self._log = log
        self._lent: list[Any] = []
        self._expected: defaultdict[Link, deque[memoryview]] = defaultdict(deque)

    def post(self, link: Link, data: memoryview) -> None:
        assert isinstance(link, FarLink)
        self._log.append(("post", link.peer, data.nbytes))
        self._lent.append((link, link.lend(self._call, data)))

    def expect(self, link: Link, into: memoryview) -> None:
        assert isinstance(link, FarLink)
        self._log.append(("expect", link.peer, into.nbytes))
        self._expected[link].append(into)

    def wait(self, link: Link, on_piece: OnPiece | None = None) -> None:
        assert isinstance(link, FarLink)
        into = self._expected[link].popleft()
        self._log.append(("receive", link.peer, into.nbytes))
        link.take(self._call, into, on_piece)

    def while_waiting(self, let_next: Callable[[], bool]) -> None:
        pass

    def take_over(self) -> None:
        pass

    def __enter__(self) -> Outbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            assert not any(self._expected.values())
            for link, frame in self._lent:
                link.wait(self._call, frame)


class FarLink(InprocLink, QueuedLink):
    """A link between threads, with a window of the test's. ``log`` has what its outboxes did."""

    given: int
    log: list[Any]

    @property
    def window(self) -> int:
        return self.given

    def lend(self, call: Call, data: memoryview) -> Any:
        return self._offer(call, data)

    def take(self, call: Call, into: memoryview, on_piece: OnPiece | None) -> None:
        self._receive(call, into, on_piece)

    def wait(self, call: Call, frame: Any) -> None:
        self._finish_send(call, frame)

    def relay(self, call: Call, source: Link, into: memoryview) -> None:
        self.log.append(("relay", source.peer, self.peer, into.nbytes))
        source.recv_into(call, into)
        self.send(call, into)

    def outbox(self, call: Call, former: Outbox | None = None) -> Outbox:
        assert former is None
        return _InprocOutbox(call, self.log)


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
            link.given = self._window_of(self.rank, peer)
            link.log = self.log
        return link
