"""Progress on the links of a communicator: one thread at a time moves their frames.

UCX's name and way: a thread that waits for one frame makes progress on all links of its worker. A
peer whose frames nobody reads would find its window closed, and its kernel would take the way for a
slow one.
"""

from __future__ import annotations

import math
import select
import threading
from typing import TYPE_CHECKING

from transport._call import Call
from transport._errors import CommunicatorTimeoutError
from transport._interrupts import is_held
from transport._link import OnPiece
from transport._polling import PEER_CLOSED
from transport._tcp.frame import SMALL_BYTES, Incoming, Outgoing

if TYPE_CHECKING:
    from transport._tcp.connection import Connection
    from transport._tcp.link import TcpLink


class Worker:
    """Owns ``lock``, under which the bytes of its links move, and closes their sockets.

    A descriptor must not be closed, and given to another file, under a system call: the sockets of
    a link that has ended are closed when nobody has the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._ended: set[Connection] = set()

    def leave(self) -> None:
        """Give the lock back."""
        self.lock.release()
        if self._ended:
            self._close_ended()

    def retire(self, connection: Connection) -> None:
        """Close the sockets of a connection that has been shut down, as soon as nobody uses them.
        Any thread; never blocks.
        """
        self._ended.add(connection)
        self._close_ended()

    def _close_ended(self) -> None:
        # In the middle of a call of this very thread, its end does so.
        if not is_held(self.lock) and self.lock.acquire(blocking=False):
            while self._ended:
                self._ended.pop().close_sockets()
            self.lock.release()


class FrameWorker(Worker):
    """Moves the frames that the calls of one communicator post, one call at a time.

    ``leaving`` and ``coming`` are the links with frames that are to leave, or are awaited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leaving: dict[TcpLink, None] = {}
        self.coming: dict[TcpLink, None] = {}
        self._call: Call | None = None

    def begin(self, call: Call) -> None:
        """Withdraw the frames of a call before ``call``, which was interrupted. Under the lock."""
        if call is not self._call:
            if self.leaving or self.coming:
                self.withdraw()
            self._call = call

    def withdraw(self) -> None:
        """Forget all frames. A link that is in the middle of one ends. Under the lock."""
        for link in {**self.leaving, **self.coming}:
            link.withdraw()
        self.leaving.clear()
        self.coming.clear()

    def wait(self, request: Outgoing | Incoming, on_piece: OnPiece | None) -> None:
        """Make progress on all links until ``request`` is done."""
        link: TcpLink = request.link  # pyright: ignore[reportAssignmentType]
        request.call.waiting_for = link.peer
        self.lock.acquire()
        try:
            self._wait(link, request, on_piece)
        finally:
            if not request.done:
                self.withdraw()
            self.leave()

    def _wait(self, link: TcpLink, request: Outgoing | Incoming, on_piece: OnPiece | None) -> None:
        awaited = request if isinstance(request, Incoming) else None
        ready: dict[TcpLink, None] | None = None
        while True:
            if awaited is not None and not self.leaving and self._need_read_no_other(link):
                link.receive(awaited, on_piece)
                return
            if ready is None:
                ready = {**self.leaving, **self.coming}
            moved = self._serve(ready)
            if awaited is not None:
                if on_piece is not None and awaited.received:
                    on_piece(awaited.received)
                if not awaited.done:
                    link.check_awaited(awaited)
            if request.done:
                return
            ready = moved or self._poll(request.call, link, awaited)

    def _need_read_no_other(self, link: TcpLink) -> bool:
        """Whether the kernel has room for whatever comes on other links meanwhile."""
        return len(self.coming) == 1 or all(
            other is link or other.coming[0].into.nbytes <= SMALL_BYTES for other in self.coming
        )

    def _serve(self, ready: dict[TcpLink, None]) -> dict[TcpLink, None]:
        """Move a step of the first frames of these links, each way; return where one moved."""
        moved: dict[TcpLink, None] = {}
        for link in ready:
            if link.leaving and link.push():
                moved[link] = None
            if link.coming and link.pull():
                moved[link] = None
        return moved

    def _poll(
        self, call: Call, awaited_link: TcpLink, awaited: Incoming | None
    ) -> dict[TcpLink, None]:
        """Wait until a link takes or brings more; return those.

        Raises past the deadline, which names the peers that are waited for, and when a peer has
        hung up that has not received everything.
        """
        wanted: dict[int, int] = {}
        links: dict[int, TcpLink] = {}
        for link in self.leaving:
            for sock in link.leaving[0].waits_on:
                # If somebody hangs up who sends, reading finds out, behind what was still sent.
                hangs_up = 0 if link.coming else PEER_CLOSED
                wanted[sock.fileno()] = select.POLLOUT | hangs_up
                links[sock.fileno()] = link
        for link in self.coming:
            for sock in link.brings_on:
                wanted[sock.fileno()] = wanted.get(sock.fileno(), 0) | select.POLLIN
                links[sock.fileno()] = link
        poller = select.poll()
        for descriptor, events in wanted.items():
            poller.register(descriptor, events)
        while True:
            expired = call.deadline.expired
            ready = poller.poll(math.ceil(call.deadline.piece() * 1000))
            if ready or expired:
                break
        for descriptor, events in ready:
            link = links[descriptor]
            if not link.coming and not events & select.POLLOUT:
                raise link.lost("it hung up before it had received everything")
        if not ready:
            parts = [f"{link.name} took nothing" for link in self.leaving]
            parts += [f"{awaited_link.name} sent nothing"] if awaited is not None else []
            raise CommunicatorTimeoutError(
                f"{call.header}: within {call.deadline.seconds:g} s {' and '.join(parts)}",
                awaited_link.peer,
            )
        return {links[descriptor]: None for descriptor, _ in ready}
