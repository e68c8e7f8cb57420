"""Collectives and messages over TCP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys, has_not_entered
from transport._errors import (
    AuthenticationError,
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    DistStoreError,
    PeerLostError,
)
from transport._links.communicator import LinkCommunicator
from transport._links.mailbox import Mailbox
from transport._operands.reduce_op import Flat
from transport._tcp.far import connections_from_environment
from transport._tcp.inbox import MessageWorker, TcpMailbox
from transport._tcp.link import FrameWorker, TcpLink
from transport._tcp.meeting.address import listening_host
from transport._tcp.meeting.dial import Dial, address_key, publish
from transport._tcp.meeting.endpoint import TcpEndpoint
from transport._tcp.meeting.hello import WELCOME, Hello, TrafficKind
from transport._tcp.messages import MessageLink
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition, next_slice

# If a peer has not connected after this time, this rank checks whether the peer is alive.
_FIRST_WAIT_SECONDS = 0.2
_JOIN_SECONDS = 5.0


class TcpCommunicator(LinkCommunicator):
    """A communicator over TCP, which connects two members at their first communication.

    For collectives, the member with the higher rank connects. Messages use a separate connection,
    which the first sender or receiver opens. Through it, a waiting receiver notices the loss of the
    other member, and so does a member that waits for another one's connection for collectives.
    (The store reports ranks that die or leave the job, but not those that leave this group.)
    ``mailbox`` receives the messages; another transport may share it.
    """

    tuned_as = "tcp"

    def __init__(
        self,
        membership: Membership,
        table: Thresholds | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        inbox = TcpMailbox(membership) if mailbox is None else None
        super().__init__(membership, table, mailbox or inbox)
        runtime = membership.runtime
        # Guards everything below. No thread waits for another rank while it holds the lock.
        self._lock = threading.RLock()
        self._changed = Condition(self._lock)
        # By peer, the connections of its future link; None: not arrived yet.
        self._arrived: dict[int, list[socket.socket | None]] = {}
        self._links: dict[int, TcpLink] = {}
        self._frames = FrameWorker()
        # By peer, the link for sending. If two members connect to each other at the same time, the
        # peer may send on another link.
        self._message_links: dict[int, MessageLink] = {}
        # By peer, the thread that is opening a message link to it.
        self._opening: dict[int, int] = {}
        self._ends: dict[int, PeerLostError] = {}
        self._gone: dict[int, PeerLostError] = {}
        # By peer, the error because of which this rank would not notice its end.
        self._unwatched: dict[int, Exception] = {}
        self._addresses = PeerKeys(membership)
        self._known: dict[int, bytes] = {}
        self._dials: set[Dial] = set()
        self._dialled: dict[int, list[socket.socket]] = {}
        self._connections = connections_from_environment()
        # Threads that open connections.
        self._threads: tuple[threading.Thread, ...] = ()
        self._endpoint = runtime.shared(
            "tcp-endpoint",
            lambda: TcpEndpoint(runtime.secret, listening_host(membership), tls=runtime.tls),
        )
        self._messages = MessageWorker(
            self.mailbox, self._record_end, self._endpoint.attend, self._endpoint.wake
        )
        if inbox is not None:
            inbox.worker = self._messages
        publish(membership, self._endpoint.address)
        self._endpoint.register(membership.group, self._deliver)

    def link(self, peer: int, call: Call) -> TcpLink:
        link = self._links.get(peer)
        return self._open_link(peer, call) if link is None else link

    def reach(self, peers: Sequence[int], call: Call) -> None:
        """Connect to the ``peers`` of lower rank in parallel, with a thread for each.

        Raises the first error, one of those of ``link``.
        """
        found = {*self._links, *self._dialled}
        missing = [peer for peer in peers if peer < self.rank and peer not in found]
        if len(missing) < 2:
            return
        unknown = [peer for peer in missing if peer not in self._known]
        self._known |= self._addresses.read_all(address_key, unknown, call)

        def dial(peer: int) -> None:
            socks = self._dial_link(peer, call)
            with self._lock:
                if self.abort_reason is None:
                    self._dialled[peer] = socks
                    return
            _close(socks)

        call.waiting_for = missing[0]
        self._dial_in_parallel(missing, dial)

    def _dial_in_parallel(self, numbers: Sequence[int], dial: Callable[[int], None]) -> None:
        """``dial`` each number in its own thread; raise the first error at once.

        If no thread can be started, the calling thread dials.
        """
        ended: SimpleQueue[Exception | None] = SimpleQueue()

        def run(number: int) -> None:
            try:
                dial(number)
                ended.put(None)
            except Exception as error:  # noqa: BLE001 (raised below)
                ended.put(error)

        for number in numbers:
            try:
                self._begin_thread(f"meshlib-tcp-dial-{number}", partial(run, number))
            except RuntimeError:
                run(number)
        left = len(numbers)
        while left:
            try:
                error = ended.get(timeout=next_slice())
            except Empty:
                continue
            left -= 1
            if error is not None:
                raise error

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        self._message_link(dst, call).send(call, data)

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        if src is not None and src not in self._message_links:
            self._open_for_receive(src, call)
        return self.mailbox.recv(call, buffer, src, tag)

    def lose(self, peer: int, reason: str) -> None:
        self._record_end(peer, PeerLostError(reason, peer))

    def abort(self, reason: str) -> None:
        super().abort(reason)
        for link in self._shut(reason):
            link.abort(reason)

    def close(self) -> None:
        super().close()
        self._endpoint.unregister(self.membership.group)
        for link in self._shut("the communicator was closed"):
            link.close()
        self._messages.close()
        deadline = Deadline.after(_JOIN_SECONDS)
        for thread in self._threads:  # _shut cancelled their dials
            thread.join(deadline.remaining())

    def _shut(self, reason: str) -> list[TcpLink | MessageLink]:
        """Wake the threads that wait for a connection, and refuse later connections.

        ``abort_reason`` is set. Returns all open links.
        """
        with self._lock:
            unclaimed = [*self._arrived.values(), *self._dialled.values()]
            self._arrived.clear()
            self._dialled.clear()
            dials = list(self._dials)
            links = [*self._links.values(), *self._messages.links]
            self._changed.notify_all()
        self._addresses.cancel(reason)
        for dial in dials:
            dial.cancel(reason)
        for socks in unclaimed:
            _close(socks)
        return links

    def _begin_thread(self, name: str, task: Callable[[], None]) -> None:
        """Run ``task``, which connects, in a new thread. Raises RuntimeError if none can start."""
        thread = threading.Thread(target=task, name=name, daemon=True)
        thread.start()
        self._threads = (*(other for other in self._threads if other.is_alive()), thread)

    # Opening.

    def _open_link(self, peer: int, call: Call) -> TcpLink:
        call.waiting_for = peer
        if peer < self.rank:
            socks = self._dialled.pop(peer, None) or self._dial_link(peer, call)
        else:
            socks = self._await_arrival(peer, call)
        link = TcpLink(socks, peer, self.membership.describe(peer), self._frames)
        with self._lock:
            opened = self.abort_reason is None
            if opened:
                self._links[peer] = link
        if not opened:
            link.close()
            raise CommunicatorAbortedError(self.abort_reason or "")
        return link

    def _dial_link(self, peer: int, call: Call) -> list[socket.socket]:
        """Make the connections of the link to ``peer``: the first one, then the others."""
        first, count = self._dial(peer, TrafficKind.COLLECTIVE, call, 0, self._connections)
        socks = {0: first}

        def dial(number: int) -> None:
            sock, _ = self._dial(peer, TrafficKind.COLLECTIVE, call, number, count)
            with self._lock:
                if socks:
                    socks[number] = sock
                    return
            sock.close()

        try:
            self._dial_in_parallel(range(1, count), dial)
        except Exception:
            with self._lock:
                unused = list(socks.values())
                socks.clear()
            _close(unused)
            raise
        return [socks[number] for number in range(count)]

    def _await_arrival(self, peer: int, call: Call) -> list[socket.socket]:
        first_wait = Deadline.after(min(_FIRST_WAIT_SECONDS, call.deadline.remaining()))
        socks = self._wait_for_arrival(peer, first_wait)
        if socks is None and not call.deadline.expired:
            # A peer that has left refuses the message link. Otherwise the link reports its end.
            if peer not in self._message_links:
                notice = partial(self._watch_end, peer, Call(call.header, call.deadline))
                try:
                    self._begin_thread(f"meshlib-tcp-dial-{peer}", notice)
                except RuntimeError:  # no thread can be started
                    notice()
            socks = self._wait_for_arrival(peer, call.deadline)
        if socks is None:
            raise self._has_not_connected(peer, call)
        return socks

    def _has_not_connected(self, peer: int, call: Call) -> CommunicatorTimeoutError:
        store = self.membership.store.with_grace(_FIRST_WAIT_SECONDS)
        with suppress(DistStoreError):
            if not store.check([address_key(peer)]):
                return has_not_entered(call, self.membership, peer)
        return CommunicatorTimeoutError(
            f"{call.header}: {self.membership.describe(peer)} has not connected within"
            f" {call.deadline.seconds:g} s",
            peer,
        )

    def _wait_for_arrival(self, peer: int, deadline: Deadline) -> list[socket.socket] | None:
        with self._lock:
            while True:
                arrived = self._arrived.get(peer, [None])
                socks = [sock for sock in arrived if sock is not None]
                if len(socks) == len(arrived):
                    del self._arrived[peer]
                    return socks
                self.check_open()
                if peer in self._gone:
                    raise PeerLostError.of(self._gone[peer], peer)
                if peer in self._unwatched:
                    raise self._unwatched.pop(peer)
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    return None

    def _watch_end(self, peer: int, call: Call) -> None:
        """Open a message link to ``peer``, for which this rank waits, to notice its end."""
        try:
            self._message_link(peer, call)
        except PeerLostError:  # the waiting threads have this error
            pass
        except (DistError, OSError) as error:
            with self._lock:
                self._unwatched[peer] = error
                self._changed.notify_all()

    def _open_for_receive(self, src: int, call: Call) -> None:
        if src != self.rank and src not in self._gone:
            with suppress(PeerLostError):  # The mailbox has this error, and earlier messages.
                self._message_link(src, call)

    def _message_link(self, peer: int, call: Call) -> MessageLink:
        """Return the message link to ``peer``, opening it at the first use."""
        link = self._message_links.get(peer)
        if link is not None:
            return link
        try:
            return self._open_message_link(peer, call)
        except (PeerLostError, AuthenticationError) as error:
            link = self._message_links.get(peer)
            if link is not None or isinstance(error, PeerLostError):
                self._record_end(peer, PeerLostError.of(error, peer))
            if link is None:
                raise
            # The peer connected in the meantime, and left during this rank's handshake.
            return link

    def _open_message_link(self, peer: int, call: Call) -> MessageLink:
        call.waiting_for = peer
        me = threading.get_ident()
        try:
            with self._lock:  # waits for an _accept of the peer's connection
                self._await_opening(peer, call)
                if peer in self._message_links:
                    return self._message_links[peer]
                self._opening[peer] = me
            sock, _ = self._dial(peer, TrafficKind.POINT_TO_POINT, call)
            with self._lock:
                if self.abort_reason is None:
                    return self._add_message_link(peer, sock)
            sock.close()
            raise CommunicatorAbortedError(self.abort_reason)
        finally:
            with self._lock:
                if self._opening.get(peer) == me:
                    del self._opening[peer]
                self._changed.notify_all()
            self._fail_if_silent(peer)

    def _await_opening(self, peer: int, call: Call) -> None:
        """Wait until no other thread is connecting to ``peer``. The caller holds the lock."""
        while self._opening.get(peer, threading.get_ident()) != threading.get_ident():
            self.check_open()
            if not self._changed.wait(call.deadline.remaining()) and call.deadline.expired:
                raise CommunicatorTimeoutError(
                    f"{call.header}: another thread has been connecting to"
                    f" {self.membership.describe(peer)} for {call.deadline.seconds:g} s",
                    peer,
                )

    def _add_message_link(self, peer: int, sock: socket.socket) -> MessageLink:
        """Make a message link of a connection. The caller holds the lock."""
        name = self.membership.describe(peer)
        link = MessageLink(sock, peer, name, self._messages, self.mailbox)
        self._messages.add(link)
        # All messages to a member use the first connection, to preserve their order.
        return self._message_links.setdefault(peer, link)

    def _record_end(self, peer: int, error: PeerLostError) -> None:
        """Record that ``peer`` has ended or refused a connection, as it does when it leaves."""
        with self._lock:
            self._ends.setdefault(peer, error)
        self._fail_if_silent(peer)

    def _fail_if_silent(self, peer: int) -> None:
        """End the waits for ``peer`` if nothing more can arrive from it.

        Messages may arrive while a message link is open, or is being opened: the peer may have
        accepted it, sent messages, and left.
        """
        with self._lock:
            error = self._ends.get(peer)
            talking = any(other.peer == peer for other in self._messages.links)
            if error is None or talking or peer in self._opening:
                return
            self._gone.setdefault(peer, error)
            self._changed.notify_all()
        self.mailbox.fail(peer, error)

    def _dial(
        self, peer: int, channel: TrafficKind, call: Call, number: int = 0, count: int = 1
    ) -> tuple[socket.socket, int]:
        """Return a connection, and the number of connections of the link to ``peer``."""
        dial = Dial(self.membership, peer, channel, self._known.get(peer), number, count)
        with self._lock:
            self.check_open()
            self._dials.add(dial)
        try:
            return dial.connect(call), dial.connections
        finally:
            with self._lock:
                self._dials.discard(dial)

    def _deliver(self, hello: Hello, sock: socket.socket) -> None:
        """Accept a connection from the endpoint, or close it."""
        with self._lock:
            superfluous = self._accept(hello, sock)
        _close(superfluous)

    def _accept(self, hello: Hello, sock: socket.socket) -> Iterable[socket.socket | None]:
        """Store a connection and welcome it; return the connections to close. The caller holds
        the lock, so that the peer's connection is known before its end can be noticed.
        """
        peer, number, collective = hello.rank, hello.number, hello.channel == TrafficKind.COLLECTIVE
        if self.abort_reason is not None or peer >= self.size or peer == self.rank:
            return (sock,)
        arrived = self._arrived.get(peer, ())
        # A peer that gave up and tries again begins with number 0.
        expected = number == 0 < hello.connections or number < len(arrived) == hello.connections
        if collective and (peer < self.rank or peer in self._links or not expected):
            return (sock,)
        try:
            sock.send(WELCOME)
        except OSError:
            return (sock,)
        if not collective:
            self._add_message_link(peer, sock)
            return ()
        older: Iterable[socket.socket | None] = ()
        if number == 0:
            older, self._arrived[peer] = arrived, [None] * hello.connections
        self._arrived[peer][number] = sock
        self._changed.notify_all()
        return older


def _close(socks: Iterable[socket.socket | None]) -> None:
    for sock in socks:
        if sock is not None:
            sock.close()
