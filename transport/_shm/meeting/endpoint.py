"""A rank's endpoint, which sends descriptors of memory to peers and notices their loss.

Each rank listens on one Unix socket in the abstract namespace. The kernel chooses its name, which
is in no file system and ends with the process. Both ends of a connection prove that they know the
job's secret and belong to the same user. A connection stays open as long as both processes live:
its end shows a peer's death, independently of the store and of the peer's state.

One thread reads all packets, so no other thread blocks on a socket. A caller waits for its
``DescriptorRequest``, which an abort completes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from transport._errors import (
    AuthenticationError,
    DistBackendError,
    DistNetworkError,
    PeerLostError,
)
from transport._net.acceptor import Acceptor
from transport._net.event_loop import EventLoop, sooner
from transport._net.limits import explain
from transport._net.sockets import close_in_forked_children
from transport._shm.meeting.peer_connection import Operation, Packet, PeerConnection, same_user
from transport._waiting.interrupts import sliced

_LOGGER = logging.getLogger("meshlib.transport")
_BACKLOG = 4096
# The time between attempts to connect to a peer whose listen queue is full.
_RETRY_SECONDS = 0.02
# The kernel's errors if no process listens.
_GONE = {errno.ECONNREFUSED, errno.ENOENT, errno.EPIPE, errno.ECONNRESET}

LEFT = "has closed its communicator"
ABORTED = "has aborted"
DIED = "is gone: its process has ended"


class EndpointUser(Protocol):
    """A communicator's callbacks, in the endpoint's thread. They must not block."""

    def offer(self, what: str) -> int:
        """Return a new descriptor of the memory ``what``; raise LookupError if there is none."""
        ...

    def on_gone(self, rank: int, how: str) -> None:
        """Handle the loss of member ``rank``; ``how`` completes "rank 3 …"."""
        ...

    def on_kick(self) -> None:
        """Make room in this rank's inbox, because a sender waits for it."""
        ...

    def abort(self, reason: str) -> None:
        """Abort, because this rank cannot serve the group any more."""
        ...


class DescriptorRequest:
    """A request to member ``peer`` of ``group``, called ``name`` in messages.

    The requesting thread waits for the answer.
    """

    connection: PeerConnection | None = None

    def __init__(self, group: str, peer: int, name: str) -> None:
        self.group = group
        self.peer = peer
        self.name = name
        self._done = threading.Event()
        self._fd = -1
        self._error: Exception | None = None

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the answer; return whether it has arrived."""
        return sliced(self._done.wait, seconds)

    def take(self) -> int:
        """Return the received descriptor (-1: none was requested), or raise the received error."""
        if self._error is not None:
            raise self._error
        fd, self._fd = self._fd, -1
        return fd

    def complete(self, fd: int = -1, error: Exception | None = None) -> None:
        """Set the answer; only the first call has an effect."""
        if self._done.is_set():
            if fd >= 0:
                os.close(fd)
            return
        self._fd, self._error = fd, error
        self._done.set()

    def refuse(self, how: str) -> None:
        """Complete with the loss of the peer; ``how`` completes its name."""
        self.complete(error=PeerLostError(f"{self.name} {how}", self.peer))

    def discard(self) -> None:
        """Discard the answer, whether it has arrived or not."""
        self.complete(error=DistNetworkError("the request was discarded"))
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ShmEndpoint:
    """Listens at ``address`` in its own daemon thread until ``close``."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(b"")  # the kernel chooses a free abstract name
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        close_in_forked_children(listener)
        name = listener.getsockname()
        self.address: bytes = name if isinstance(name, bytes) else name.encode()
        # Guards the fields that other threads use, too. Only the loop uses the selector.
        self._lock = threading.Lock()
        self._services: dict[str, EndpointUser] = {}
        self._outward: dict[bytes, PeerConnection] = {}
        self._connections: set[PeerConnection] = set()
        self._requests: dict[int, DescriptorRequest] = {}
        self._next_number = 1
        self._connecting: list[PeerConnection] = []  # only the loop uses it
        self._errands: deque[Callable[[], None]] = deque()
        self._loop = EventLoop("meshlib-shm-endpoint", self._turn, self._end)
        self._selector = self._loop.selector
        self._acceptor = Acceptor(listener, secret, self._selector, self._welcome)
        self._loop.start()

    # For communicators.

    def register(self, group: str, service: EndpointUser) -> None:
        """Serve ``group`` from now on."""
        with self._lock:
            self._services[group] = service

    def unregister(self, group: str, how: str) -> None:
        """Stop serving ``group``, and notify its connected peers. Never blocks.

        This rank's pending requests for ``group`` fail. Idempotent.
        """
        with self._lock:
            if self._services.pop(group, None) is None:
                return
            for connection in self._connections:
                if group in connection.users:
                    connection.send(Packet(Operation.GONE, group, text=how))
                    del connection.users[group]
            ended = [request for request in self._requests.values() if request.group == group]
        for request in ended:
            request.refuse(f"cannot answer any more: this rank {how}")

    def request(
        self, address: bytes, group: str, rank: int, peer: int, what: str, name: str
    ) -> tuple[int, DescriptorRequest]:
        """Request the memory ``what`` from ``peer`` of ``group``, whose endpoint is at ``address``.

        ``name`` is the peer's name in messages. Returns a number for ``forget``, and the request.
        Never blocks.
        """
        request = DescriptorRequest(group, peer, name)
        with self._lock:
            try:
                connection = self._connect(address)
            except OSError as error:
                request.complete(error=_unreachable(name, peer, error))
                return 0, request
            request.connection = connection
            number = self._next_number
            self._next_number += 1
            self._requests[number] = request
            connection.users[group] = peer
            connection.send(Packet(Operation.REQUEST, group, number, rank, what))
        self._loop.wake()
        return number, request

    def watch(self, address: bytes, group: str, rank: int, peer: int, name: str) -> None:
        """Notify the service of ``group`` when ``peer``, at ``address``, is lost.

        Never blocks. If the peer is lost already, the calling thread notifies the service. Raises
        DistNetworkError if this rank cannot connect.
        """
        with self._lock:
            if any(connection.users.get(group) == peer for connection in self._connections):
                return
            service = self._services.get(group)
            try:
                connection = self._connect(address)
            except OSError as error:
                if error.errno not in _GONE:
                    raise _unreachable(name, peer, error) from error
                connection = None
            else:
                connection.users[group] = peer
                connection.send(Packet(Operation.REQUEST, group, 0, rank))
        if connection is not None:
            self._loop.wake()
        elif service is not None:
            service.on_gone(peer, DIED)

    def _connect(self, address: bytes) -> PeerConnection:
        """Return the connection to ``address``, or begin one. The caller holds the lock."""
        connection = self._outward.get(address)
        if connection is None:
            connection = self._outward[address] = PeerConnection.to(address, self._secret)
            self._connections.add(connection)
            self._errands.append(partial(self._begin_receiving, connection))
        return connection

    def forget(self, number: int) -> None:
        """Drop the request ``number``; a later answer is ignored."""
        with self._lock:
            self._requests.pop(number, None)

    def kick(self, group: str, rank: int) -> None:
        """Ask member ``rank``'s endpoint to empty its inbox. Never blocks; may be lost."""
        with self._lock:
            for connection in self._connections:
                if connection.users.get(group) == rank:
                    connection.send(Packet(Operation.KICK, group), may_drop=True)
                    return

    def close(self) -> None:
        """Stop listening and release all connections. Idempotent."""
        self._loop.stop()

    # The loop.

    def _turn(self) -> float | None:
        self._acceptor.expire()
        while self._errands:
            self._errands.popleft()()
        connecting, self._connecting = self._connecting, []
        for connection in connecting:
            self._begin_receiving(connection)
        pause = _RETRY_SECONDS if self._connecting else None
        return sooner(self._acceptor.seconds_to_wait(), pause)

    def _end(self) -> None:
        self._acceptor.close()
        for connection in list(self._connections):
            self._drop(connection)

    def _begin_receiving(self, connection: PeerConnection) -> None:
        try:
            with self._lock:
                connected = connection.begin()
            if not connected:
                self._connecting.append(connection)
                return
            self._selector.register(
                connection.sock, selectors.EVENT_READ, partial(self._on_packet, connection)
            )
        except (OSError, ValueError) as error:
            self._drop(connection, error)

    def _welcome(self, sock: socket.socket) -> None:
        """Serve an authenticated connection."""
        if not same_user(sock):
            _LOGGER.warning("refused a connection from another user")
            sock.close()
            return
        connection = PeerConnection(sock, None)
        with self._lock:
            self._connections.add(connection)
        self._begin_receiving(connection)

    def _on_packet(self, connection: PeerConnection, _events: int) -> None:
        while True:
            try:
                with self._lock:
                    shaking = connection.shake_hands()
                received = None if shaking else connection.receive()
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, ValueError, AuthenticationError) as error:
                _LOGGER.debug("a shared-memory connection ended: %s", error)
                self._drop(connection, error)
                return
            if received is not None:
                try:
                    self._act(connection, *received)
                except Exception as error:
                    _LOGGER.exception("a shared-memory connection failed")
                    self._drop(connection, error)
                    return

    def _act(self, connection: PeerConnection, message: Packet, fd: int) -> None:
        operation = message.operation
        if operation is Operation.GIVE:
            with self._lock:
                found = self._requests.pop(message.number, None)
            if found is not None and fd >= 0:
                found.complete(fd)
                return
            if found is not None:
                # The kernel drops a descriptor if the process may not open more.
                why = explain(OSError(errno.EMFILE, ""))
                text = f"cannot receive the memory of {found.name}: {why}"
                found.complete(error=DistBackendError(text))
                return
        if fd >= 0:
            os.close(fd)
        with self._lock:
            service = self._services.get(message.group)
        if operation is Operation.REFUSE:
            self._on_refusal(connection, service, message)
        elif operation is Operation.REQUEST:
            self._answer(connection, service, message)
        elif operation is Operation.KICK:
            if service is not None:
                service.on_kick()
        elif operation is Operation.GONE:
            with self._lock:
                rank = connection.users.pop(message.group, None)
            if service is not None and rank is not None:
                service.on_gone(rank, message.text)

    def _on_refusal(
        self, connection: PeerConnection, service: EndpointUser | None, message: Packet
    ) -> None:
        with self._lock:
            found = self._requests.pop(message.number, None)
            rank = None if message.number else connection.users.pop(message.group, None)
        if found is not None:
            found.refuse(message.text)
        elif service is not None and rank is not None:
            service.on_gone(rank, message.text)

    def _answer(
        self, connection: PeerConnection, service: EndpointUser | None, message: Packet
    ) -> None:
        number, what, trouble = message.number, message.text, ""
        if service is None:
            answer, fd = Packet(Operation.REFUSE, message.group, number, text=LEFT), -1
        else:
            with self._lock:
                connection.users[message.group] = message.rank
            try:
                fd = service.offer(what) if what else -1
                answer = Packet(Operation.GIVE, message.group, number)
            except (LookupError, OSError, DistBackendError) as error:
                fd, text = -1, str(error)
                if not isinstance(error, LookupError):
                    trouble = f"cannot share its memory: {explain(error)}"
                    text = f"{ABORTED}: {trouble}"
                answer = Packet(Operation.REFUSE, message.group, number, text=text)
        with self._lock:
            connection.send(answer, fd=fd)
            # The group may have been closed in the meantime, without notifying this peer.
            if service is not None and message.group not in self._services:
                connection.users.pop(message.group, None)
                connection.send(Packet(Operation.GONE, message.group, text=LEFT))
        if fd >= 0:
            os.close(fd)
        if trouble and service is not None:
            service.abort(f"this rank {trouble}")

    def _drop(self, connection: PeerConnection, error: Exception | None = None) -> None:
        """Release a connection that has ended, and notify the services that used it."""
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(connection.sock)
        with self._lock:
            self._connections.discard(connection)
            for address, other in list(self._outward.items()):
                if other is connection:
                    del self._outward[address]
            lost = {n: r for n, r in self._requests.items() if r.connection is connection}
            for number in lost:
                del self._requests[number]
            users, connection.users = connection.users, {}
            to_notify = [
                (service, rank)
                for group, rank in users.items()
                if (service := self._services.get(group)) is not None
            ]
            connection.sock.close()
        for request in lost.values():
            if isinstance(error, PermissionError):
                request.complete(error=_unreachable(request.name, request.peer, error))
            elif isinstance(error, AuthenticationError):
                request.complete(error=AuthenticationError(f"{request.name}: {error}"))
            else:
                request.refuse(DIED)
        if not self._loop.stopping:
            for service, rank in to_notify:
                service.on_gone(rank, DIED)


def _unreachable(name: str, peer: int, error: OSError) -> DistNetworkError:
    """Return the error for a failed connection: ``peer`` has died, or this rank cannot connect."""
    if error.errno in _GONE:
        return PeerLostError(f"{name} {DIED} ({error})", peer)
    return DistNetworkError(f"cannot connect to {name}: {explain(error)}")
