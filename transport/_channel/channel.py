"""A channel: connections between the members of a group, one per direction, made at the first use.

The channel moves bytes. Its user is a ``Protocol``, which is called with the frames that arrive.
*Posts* are messages that survive broken connections: they are numbered, resent on the next
connection until the peer has acknowledged them, and delivered once, in order.
"""

from __future__ import annotations

import errno
import itertools
import socket
import threading
import time
import typing
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

from transport._calls.call import Call
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._channel.buffer_pool import BufferPool
from transport._channel.connection import ChannelConnection, Receiver
from transport._channel.frames import FIRST_KIND, ChannelFrame, Control
from transport._channel.greeting import Greeting
from transport._channel.threads import ThreadPool
from transport._communicators.runtime import Membership
from transport._errors import (
    AuthenticationError,
    CommunicatorTimeoutError,
    DistError,
    DistNetworkError,
    PeerLostError,
)
from transport._tcp.meeting.address import listening_host
from transport._tcp.meeting.dial import Dial, publish
from transport._tcp.meeting.endpoint import TcpEndpoint
from transport._tcp.meeting.hello import WELCOME, Hello, TrafficKind
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import sliced

GREETING_SECONDS = 10.0
"""The deadline of one attempt to connect; callers with later deadlines start another."""
_ACKNOWLEDGED_EVERY = 64
_CLOSED = "the channel was closed on this side"


class Protocol(Receiver, typing.Protocol):
    """The user of a channel. Its methods are called in any thread, and must not block."""

    def on_post(self, connection: ChannelConnection, data: bytes | memoryview) -> None:
        """Handle a post of the connection's peer."""
        ...

    def on_refusal(self, peer: int, error: DistError) -> DistError:
        """Return the error to raise after a failed connection to ``peer``. May block."""
        ...


class _Peer:
    """The state of the connections with one member."""

    def __init__(self) -> None:
        self.dialing = threading.Lock()
        self.attempt: Future[ChannelConnection] | None = None
        """The attempt to connect, which continues when the waiting callers give up."""
        self.thread: threading.Thread | None = None
        """The thread of the attempt."""
        self.dial: Dial | None = None
        """The first step of the attempt."""
        self.greeting: ChannelConnection | None = None
        """The second step: the new connection."""
        self.sending = threading.Lock()
        """Guards the fields that follow."""
        self.connection: ChannelConnection | None = None
        self.posts: deque[tuple[int, bytes]] = deque()
        """The posts that the peer has not acknowledged."""
        self.posted = 0
        self.gone: str | None = None
        self.receiving = threading.RLock()
        """Guards the peer's posts: one thread may read the rest of a broken connection while
        another reads the next connection."""
        self.received = 0
        """The number of the peer's last post."""
        self.latest = 0
        """The number of the peer's latest connection: it has given up the earlier ones."""


class Channel:
    """One member's connections, run by ``threads``. ``describe(rank)`` names a member in errors.

    Connections of peers are accepted from ``open`` on.
    """

    def __init__(
        self, membership: Membership, threads: ThreadPool, describe: Callable[[int], str]
    ) -> None:
        self._membership = membership
        self._threads = threads
        self._describe = describe
        self._buffers = BufferPool()
        self._greeting = Greeting()
        self._peers = [_Peer() for _ in range(membership.size)]
        self._incoming: dict[ChannelConnection, int] = {}
        """The connections that peers have made, numbered in the order of their arrival."""
        self._accepted = itertools.count(1)
        self._closed = False

    def open(self, protocol: Protocol) -> None:
        """Accept connections, and pass arriving frames to ``protocol``."""
        self._protocol = protocol
        membership, runtime = self._membership, self._membership.runtime
        self._endpoint = runtime.shared(
            "tcp-endpoint",
            lambda: TcpEndpoint(runtime.secret, listening_host(membership), tls=runtime.tls),
        )
        self._endpoint.register(membership.group, self._accept)
        publish(membership, self._endpoint.address)

    # ------------------------------------------------------------------ connecting

    def connect(self, rank: int, deadline: Deadline) -> ChannelConnection:
        """Return the connection to ``rank``, making it if necessary. May block.

        An attempt continues when its callers have given up. Raises ``CommunicatorTimeoutError``
        past ``deadline``, and the protocol's error for a member that cannot be reached.
        """
        peer = self._peers[rank]
        connection = peer.connection
        if connection is not None and connection.error is None:
            return connection
        reason = "the connection to it is being made"
        with self._threads.slot_released():
            while True:
                attempt = self._attempt(rank, peer)
                try:
                    if sliced(lambda s: wait([attempt], s).done, deadline.remaining()):  # noqa: B023
                        return attempt.result()
                except CommunicatorTimeoutError as error:  # of the attempt, not of this call
                    reason = str(error)
                if deadline.expired:
                    raise CommunicatorTimeoutError(reason, rank)

    def connected(self, rank: int) -> ChannelConnection | None:
        """Return the connection to ``rank``, None if there is none."""
        return self._peers[rank].connection

    def _attempt(self, rank: int, peer: _Peer) -> Future[ChannelConnection]:
        """Return the current attempt to connect, or a new one."""
        with peer.dialing:
            attempt, made = peer.attempt, peer.connection
            if attempt is None or (attempt.done() and (made is None or made.error is not None)):
                attempt = peer.attempt = Future()
                arguments, name = (attempt, rank, peer), f"{self._threads.name}-dial-{rank}"
                thread = threading.Thread(None, self._run, name, arguments, daemon=True)
                thread.start()
                peer.thread = thread
            return attempt

    def _run(self, attempt: Future[ChannelConnection], rank: int, peer: _Peer) -> None:
        try:
            attempt.set_result(self._dial(rank, peer))
        except Exception as error:  # noqa: BLE001 (raised in the waiting callers)
            attempt.set_exception(error)

    def _dial(self, rank: int, peer: _Peer) -> ChannelConnection:
        self._threads.enter()
        try:
            try:
                return self._connect(rank, peer)
            except ConnectionAbortedError:  # by ``_cancel``
                raise
            except ConnectionError:
                return self._connect(rank, peer)  # a peer that has died no longer listens
        except (PeerLostError, AuthenticationError) as error:
            raise self._protocol.on_refusal(rank, error) from error
        except OSError as error:
            text = f"{self._describe(rank)} could not be reached: {error}"
            raise DistNetworkError(text) from error
        finally:
            peer.dial = peer.greeting = None

    def _connect(self, rank: int, peer: _Peer) -> ChannelConnection:
        deadline = Deadline.after(GREETING_SECONDS)
        call = Call(CallHeader(0, 0, NO_ROOT, Kind.SEND, 0, 0), deadline)
        with peer.sending:
            self._check_open(peer)
            dial = peer.dial = Dial(self._membership, rank, TrafficKind.RPC)
        sock = dial.connect(call)
        connection = self._connection(sock, rank, outgoing=True)
        try:
            with peer.sending:
                self._check_open(peer)
                peer.greeting = connection
            received = self._greeting.begin(connection, deadline)
        except TimeoutError as error:
            sock.close()
            text = f"{self._describe(rank)} was reached, but has not answered the greeting"
            raise CommunicatorTimeoutError(text, rank) from error
        except (DistError, OSError):
            sock.close()
            raise
        self._use(peer, connection, received)
        return connection

    def _use(self, peer: _Peer, connection: ChannelConnection, received: int) -> None:
        """Use a new connection, whose peer has received this rank's posts up to ``received``."""
        with peer.sending:
            _acknowledged(peer, received)
            connection.begin(poll=False)
            peer.connection = connection
            for number, data in peer.posts:
                with suppress(OSError):
                    connection.send(Control.POST, number, data)

    def _accept(self, hello: Hello, sock: socket.socket) -> None:
        """Accept a connection from a peer; in the endpoint's thread."""
        if self._closed or not 0 <= hello.rank < self._membership.size:
            sock.close()
            return
        sock.send(WELCOME)
        connection = self._connection(sock, hello.rank, outgoing=False)
        self._incoming[connection] = next(self._accepted)
        connection.begin(poll=True)

    def _connection(self, sock: socket.socket, rank: int, *, outgoing: bool) -> ChannelConnection:
        return ChannelConnection(sock, rank, outgoing, self, self._threads, self._buffers)

    def _check_open(self, peer: _Peer) -> None:
        if self._closed or peer.gone is not None:
            raise DistNetworkError(peer.gone or _CLOSED)

    # ------------------------------------------------------------------ frames

    def on_frames(self, connection: ChannelConnection, frames: Sequence[ChannelFrame]) -> bool:
        """Handle the channel's own frames, and pass all others to the protocol, in their order."""
        begin = 0
        for i, frame in enumerate(frames):
            if frame.kind < FIRST_KIND:
                if begin < i:
                    self._protocol.on_frames(connection, frames[begin:i])
                self._on_control(connection, frame)
                begin = i + 1
        return self._protocol.on_frames(connection, frames[begin:] if begin else frames)

    def _on_control(self, connection: ChannelConnection, frame: ChannelFrame) -> None:
        peer = self._peers[connection.peer]
        match frame.kind:
            case Control.FETCHED:
                connection.reclaim(frame.number)
            case Control.POST if connection.outgoing:
                with peer.sending:
                    _acknowledged(peer, frame.number)
            case Control.POST:
                self._on_post(peer, connection, frame)
            case Control.HELLO if not connection.outgoing:
                with peer.receiving:
                    received = peer.received
                self._greeting.on_hello(connection, frame, received)
            case _:
                raise ConnectionError(f"unexpected frame of kind {frame.kind}")

    # ------------------------------------------------------------------ posts

    def post(self, rank: int, data: bytes) -> None:
        """Send ``data``, after all earlier posts to ``rank``. Never blocks.

        It is delivered once, even if connections break, as long as both members live.
        """
        peer = self._peers[rank]
        with peer.sending:
            if peer.gone is not None or self._closed:
                return
            peer.posted += 1
            peer.posts.append((peer.posted, data))
            connection = peer.connection
            if connection is not None:
                with suppress(OSError):
                    connection.send(Control.POST, peer.posted, data)
                    connection.poll()
                    return
        self._threads.submit(lambda: self._reconnect(rank))

    def _on_post(self, peer: _Peer, connection: ChannelConnection, frame: ChannelFrame) -> None:
        with peer.receiving:
            if frame.number <= peer.received:
                return
            peer.received = frame.number
            self._protocol.on_post(connection, frame.data)
        if frame.number % _ACKNOWLEDGED_EVERY == 0:
            connection.send(Control.POST, frame.number)

    def _reconnect(self, rank: int) -> None:
        with suppress(DistError):
            self.connect(rank, Deadline.after(GREETING_SECONDS))

    # ------------------------------------------------------------------ ends

    def on_end(self, connection: ChannelConnection, error: Exception) -> None:
        """Drop an ended connection, and resend unacknowledged posts on a new one."""
        if not connection.outgoing:
            self._incoming.pop(connection, None)
        else:
            peer = self._peers[connection.peer]
            with peer.sending:
                if peer.connection is connection:
                    peer.connection = None
                unacknowledged = bool(peer.posts)
            if unacknowledged and not self._closed:
                self._threads.submit(lambda: self._reconnect(connection.peer))
        self._protocol.on_end(connection, error)

    def end_earlier(self, connection: ChannelConnection) -> None:
        """End the connections that the peer made before ``connection``, and has given up."""
        peer = self._peers[connection.peer]
        peer.latest = max(peer.latest, self._incoming.get(connection, 0))
        error = ConnectionResetError("the peer has made another connection")
        for one, number in list(self._incoming.items()):
            if one.peer == connection.peer and number < peer.latest:
                one.shut(error)

    def is_drained(self, rank: int) -> bool:
        """True if the connections that ``rank`` has given up were read to their end."""
        latest = self._peers[rank].latest
        return all(
            one.peer != rank or number >= latest for one, number in list(self._incoming.items())
        )

    def forget(self, rank: int, reason: str) -> None:
        """End all connections with ``rank``, which is lost, and refuse new ones."""
        peer = self._peers[rank]
        with peer.sending:
            peer.gone = reason
            peer.posts.clear()
        _cancel(peer, reason)
        error = ConnectionResetError(reason)
        for one in self.connections():
            if one.peer == rank:
                one.shut(error)

    def connections(self) -> list[ChannelConnection]:
        """Return all connections."""
        outgoing = [peer.connection for peer in self._peers if peer.connection is not None]
        return [*outgoing, *list(self._incoming)]

    def close(self, flush: float) -> None:
        """End all connections, after waiting up to ``flush`` seconds for queued bytes."""
        until = time.monotonic() + flush
        while any(one.queued for one in self.connections()) and time.monotonic() < until:
            time.sleep(0.001)
        self._closed = True
        self._endpoint.unregister(self._membership.group)
        for peer in self._peers:
            with peer.sending:  # later attempts see _closed
                _cancel(peer, _CLOSED)
        for peer in self._peers:
            if peer.thread is not None:
                peer.thread.join(1.0)
        for one in self.connections():
            one.shut(ConnectionAbortedError(_CLOSED))
        # Wait until the threads have noticed the ends.
        while self.connections() and time.monotonic() < until + 1.0:
            time.sleep(0.001)


def _acknowledged(peer: _Peer, number: int) -> None:
    while peer.posts and peer.posts[0][0] <= number:
        peer.posts.popleft()


def _cancel(peer: _Peer, reason: str) -> None:
    """Cancel the attempt to connect, if there is one."""
    dial, greeting = peer.dial, peer.greeting
    if dial is not None:
        dial.cancel(reason)
    if greeting is not None:
        greeting.error = ConnectionAbortedError(errno.ECONNABORTED, reason)
