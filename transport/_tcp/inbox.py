"""The threads that read messages from TCP connections.

A receiver or a stalled sender reads all connections while it waits, which saves two thread switches
per message. Without a waiting thread, the endpoint's thread reads, and notices when a peer leaves.
It pauses for a while after a waiting thread has read.
"""

from __future__ import annotations

import contextlib
import math
import select
import selectors
import threading
import time
from collections.abc import Callable

from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorTimeoutError, PeerLostError
from transport._links.incoming import PendingReceive
from transport._links.mailbox import Mailbox
from transport._tcp.messages import MessageLink
from transport._tcp.worker import LinkWorker, RetiredConnection
from transport._waiting.polling import (
    PEER_CLOSED,
    READABLE,
    WRITABLE,
    Poller,
    Wakeup,
    can_be_polled,
    new_poller,
)
from transport._waiting.spinning import SpinWait

# The pause of the endpoint's thread after a waiting thread has read the connections.
_AWAY_SECONDS = 0.01
_LEAVE_SECONDS = 5.0

OnEnd = Callable[[int, PeerLostError], None]
"""The thread that notices the end of a connection calls this with the peer and an error."""


class MessageWorker(LinkWorker):
    """Reads the messages of one communicator. ``on_end`` is called when a connection has ended.

    Only the thread with the ``turn`` may sleep until a message arrives. Any other thread can
    continue its work, even within a message. ``attend`` makes the endpoint's thread call ``due``,
    and ``wake_endpoint`` wakes that thread.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        on_end: OnEnd,
        attend: Callable[[MessageWorker], None],
        wake_endpoint: Callable[[], None],
    ) -> None:
        super().__init__()
        self._on_end = on_end
        self._attend = attend
        self._wake_endpoint = wake_endpoint
        self._turn = threading.RLock()
        self._spin = SpinWait(pauses=True, main_only=True)
        # Made for the first connection, or for the first thread that waits for one.
        self._poller: Poller | None = None
        self._wakeup: Wakeup | None = None
        self._links: dict[int, MessageLink] = {}
        self.speaking: dict[int, MessageLink] = {}
        """By peer, the connection on which it sends."""
        # Links whose next message has no room in the mailbox (held), or has room now (released).
        self._held: set[MessageLink] = set()
        self._released: set[MessageLink] = set()
        self.asleep: bool = False
        """True if a waiting thread sleeps, or is about to."""
        self.stopped: bool = False
        """True if threads must not wait any more."""
        # For the endpoint's thread.
        self._attended = False  # a waiting thread has read since the endpoint's last check
        self._look_at = 0.0
        self._armed = False
        self.closed: bool = False
        mailbox.on_room = self._release

    def add(self, link: MessageLink) -> None:
        """Begin to read a connection."""
        self._links[link.descriptor] = link
        self._open().register(link.descriptor, READABLE)

    def _open(self) -> Poller:
        if self._poller is not None:
            return self._poller
        with self.lock:
            if self._poller is None:
                poller, wakeup = new_poller(), Wakeup()
                poller.register(wakeup.fd, READABLE)
                self._poller, self._wakeup = poller, wakeup
                self._attend(self)
            return self._poller

    @property
    def links(self) -> list[MessageLink]:
        """The connections that have not ended."""
        return list(self._links.values())

    def wake(self) -> None:
        """Wake the sleeping reader. Thread-safe; never blocks."""
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.notify()

    def retire(self, connection: RetiredConnection) -> None:
        link = self._links.get(connection.first.fileno())
        if link is not None and link is connection:  # the next reader notices the end
            self._released.add(link)
            self.wake()
        else:
            super().retire(connection)

    def close(self) -> None:
        """Release all connections, which were closed before."""
        self.closed = True
        self.wake()
        for link in self.links:
            self._read(link, None)
        self._wake_endpoint()

    # Waiting threads.

    def take_turn(self) -> bool:
        """Return whether the caller may ``carry`` now. If not, the endpoint's thread leaves it the
        turn after the next message.
        """
        self._attended = True
        return self._turn.acquire(blocking=False)

    def resume(self) -> None:
        """Make the endpoint's thread read again, because no waiting thread does."""
        self._attended = False
        self._look_at = 0.0
        self._wake_endpoint()

    def carry(self, link: MessageLink | None, settled: Callable[[], bool], call: Call) -> None:
        """Read messages until ``settled()`` or the deadline; the next is expected on ``link``.

        The caller has acquired the turn; this releases it.
        """
        deadline = call.deadline
        try:
            while not settled() and not self.stopped:
                if link is not None and link.ended is None:
                    if self._spin.until(lambda: self._read(link, settled) or settled()):
                        continue
                elif self._spin.until(lambda: self.serve(0, settled) or settled()):
                    continue
                if deadline.expired:
                    return
                self.serve(deadline.piece(), settled)
        finally:
            self._attended = True
            self._turn.release()

    def await_room(self, link: MessageLink, call: Call) -> None:
        """Wait until the peer reads more. Meanwhile read messages, because the peer may be
        blocked in sending to this rank.
        """
        poller = select.poll()
        poller.register(link.descriptor, WRITABLE | PEER_CLOSED)
        messages, seconds = self._open(), math.inf
        if can_be_polled(messages):
            poller.register(messages, READABLE)
        else:
            seconds = _AWAY_SECONDS
        while True:
            expired = call.deadline.expired
            ready = dict(poller.poll(math.ceil(min(call.deadline.piece(), seconds) * 1000)))
            if link.descriptor in ready:
                if ready[link.descriptor] & WRITABLE:
                    return
                raise link.lost("it hung up before it had received everything")
            if not ready and expired:
                text = f"within {call.deadline.seconds:g} s {link.name} read nothing"
                raise CommunicatorTimeoutError(f"{call.header}: {text}", link.peer)
            if (ready or seconds < math.inf) and self.take_turn():
                try:
                    self.serve(0)
                finally:
                    self._turn.release()

    # Moving bytes.

    def serve(self, seconds: float, settled: Callable[[], bool] | None = None) -> bool:
        """Wait for messages, and read those that have arrived; return whether any were read."""
        released, moved, wakeup = self._released, False, self._wakeup
        try:
            self.asleep = seconds > 0
            if released or self.stopped or (settled is not None and settled()):
                seconds = 0
            events = self._open().poll(seconds)
        except ValueError:  # closed
            return False
        finally:
            self.asleep = False
        while released:
            moved |= self._read(released.pop(), settled)
        for descriptor, _ in events:
            if wakeup is not None and descriptor == wakeup.fd:
                wakeup.clear()
                continue
            link = self._links.get(descriptor)
            if link is not None:
                moved |= self._read(link, settled)
        return moved

    def _read(self, link: MessageLink, settled: Callable[[], bool] | None) -> bool:
        """Read all that has arrived on a connection, or enough to settle a receive."""
        moved, ended = False, None
        self.lock.acquire()
        try:
            if not (link.watched and link.ended is None) and not self._may_read_again(link):
                return False
            while link.pull() or (link.full and self._hold(link)):
                moved = True
                if settled is not None and settled() and not link.staged:
                    return True
        except Exception as error:  # noqa: BLE001 (it ends the connection)
            ended = self._forget(link, error)
        finally:
            self.leave()
            if ended is not None:
                self._on_end(link.peer, ended)
        return moved

    def _may_read_again(self, link: MessageLink) -> bool:
        """Return whether a held connection may be read again; raise if it has ended."""
        if self._links.get(link.descriptor) is not link:
            return False
        link.check_open()
        if link in self._held:
            return False
        self._open().register(link.descriptor, READABLE)
        link.watched = True
        return True

    def _forget(self, link: MessageLink, error: Exception) -> PeerLostError:
        """Stop reading a connection; return its error."""
        del self._links[link.descriptor]
        self._held.discard(link)
        if link.watched:
            with contextlib.suppress(OSError, ValueError):
                self._open().unregister(link.descriptor)
        return link.fail(error)

    def _hold(self, link: MessageLink) -> bool:
        """Stop reading a connection until the mailbox has room for its next message; return True
        if it has room now.
        """
        self._held.add(link)
        if link.pull():
            self._held.discard(link)
            return True
        self._open().unregister(link.descriptor)
        link.watched = False
        return False

    def _release(self) -> None:
        """Read held connections again, because the mailbox has room."""
        for link in tuple(self._held):
            self._held.discard(link)
            self._released.add(link)
            self.wake()

    # The endpoint's thread.

    def due(self, selector: selectors.BaseSelector) -> float | None:
        """Do pending work; return the seconds until the next call, None for no limit. Called before
        each wait.
        """
        poller = self._open()
        if self.closed:
            if self._armed and can_be_polled(poller):
                selector.unregister(poller)
                self._armed = False
            # A thread that was just woken still uses the poller: wait until it has left.
            if not poller.closed and self._turn.acquire(timeout=_LEAVE_SECONDS):
                poller.close()
                self._wakeup = None
                self._turn.release()
            return None
        if self._armed:
            return None
        now = time.monotonic()
        if now < self._look_at:
            return self._look_at - now
        if self._attended:
            self._attended = False
            self._look_at = now + _AWAY_SECONDS
            return _AWAY_SECONDS
        if not can_be_polled(poller):
            self._serve_if_alone()
            return _AWAY_SECONDS
        selector.register(poller, selectors.EVENT_READ, self._on_ready(selector, poller))
        self._armed = True
        return None

    def _on_ready(
        self, selector: selectors.BaseSelector, poller: select.epoll
    ) -> Callable[[int], None]:
        def on_ready(_events: int) -> None:
            if not self._serve_if_alone():
                selector.unregister(poller)
                self._armed = False
                self._attended = True

        return on_ready

    def _serve_if_alone(self) -> bool:
        """Read arrived messages, unless a waiting thread does; return whether this thread did."""
        if self._attended or not self._turn.acquire(blocking=False):
            return False
        try:
            self.serve(0, _at_once)
        finally:
            self._turn.release()
        return True


class TcpMailbox(Mailbox):
    """A mailbox whose receivers read the connections themselves while they wait."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        self.worker: MessageWorker | None = None

    def _sleep(self, call: Call, receive: PendingReceive) -> None:
        worker = self.worker
        if worker is None or not worker.take_turn():
            super()._sleep(call, receive)
            return
        self._lock.release()
        try:
            link = None if receive.src is None else worker.speaking.get(receive.src)
            worker.carry(link, receive.is_settled, call)
        finally:
            self._lock.acquire()
            settled = receive.is_settled()
            if self._receives or self._arriving > 1:
                worker.resume()
        self._check_aborted()
        if not settled and call.deadline.expired:
            raise self._late(call, receive)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        if self.worker is not None:
            self.worker.stopped = True
            self.worker.wake()

    def _on_change(self) -> None:
        if self.worker is not None and self.worker.asleep:
            self.worker.wake()


def _at_once() -> bool:
    """Return True, to read once: other connections need service as well."""
    return True
