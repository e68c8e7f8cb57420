"""Connecting to a member: read its address from the group's store, connect, send a hello."""

from __future__ import annotations

import contextlib
import socket
import threading

from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys
from transport._errors import (
    AuthenticationError,
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    DistNetworkError,
    PeerLostError,
)
from transport._net.auth import authenticate
from transport._net.reach import is_out_of_reach
from transport._net.sockets import connect, recv_exact
from transport._tcp.far import connections_to
from transport._tcp.meeting.address import Address
from transport._tcp.meeting.hello import WELCOME, Hello, TrafficKind, digest_of


def publish(membership: Membership, address: Address) -> None:
    """Publish this rank's listening address to the other members."""
    membership.store.post(address_key(membership.rank), address.encode())


def address_key(rank: int) -> str:
    """Return the key under which a rank publishes its address."""
    return f"tcp/{rank}"


class Dial:
    """One attempt to connect to ``peer``, with its published ``address`` (None: read it).

    Any thread may ``cancel`` it. ``number`` is the connection's index in the link. Number 0 decides
    how many ``connections`` the link has: the argument for a distant peer, else one.
    """

    def __init__(
        self,
        membership: Membership,
        peer: int,
        channel: TrafficKind,
        address: bytes | None = None,
        number: int = 0,
        connections: int = 1,
    ) -> None:
        self._membership = membership
        self._peer = peer
        self._name = membership.describe(peer)
        self._channel = channel
        self._address = address
        self._number = number
        self.connections: int = connections
        self._lock = threading.Lock()
        self._cancelled: str | None = None
        self._keys = PeerKeys(membership)
        self._waits_on: socket.socket | None = None

    def connect(self, call: Call) -> socket.socket:
        """Return a connection that the peer has welcomed.

        Raises:
            CommunicatorTimeoutError: past the call's deadline.
            CommunicatorAbortedError: after ``cancel``.
            PeerLostError: The peer no longer listens or is out of reach.
            AuthenticationError: The peer's secret differs.
            DistNetworkError: No network path leads to the peer.
        """
        try:
            published = self._address or self._keys.read(address_key(self._peer), self._peer, call)
            address = Address.decode(published)
            try:
                return self._greet(call, address, self._reach(call, address))
            except AuthenticationError as error:
                # A peer that dies during the handshake hangs up, and so does one that refuses the
                # proof. The second attempt distinguishes them: a dead peer no longer listens.
                if not isinstance(error.__cause__, ConnectionError):
                    raise
                return self._greet(call, address, self._reach(call, address))
        except (DistError, OSError) as error:
            if self._cancelled is not None:
                raise CommunicatorAbortedError(self._cancelled) from error
            raise

    def cancel(self, reason: str) -> None:
        """Make ``connect`` raise ``CommunicatorAbortedError`` with ``reason``. Never blocks."""
        with self._lock:
            self._cancelled = reason
            if self._waits_on is not None:
                with contextlib.suppress(OSError):
                    self._waits_on.shutdown(socket.SHUT_RDWR)
        self._keys.cancel(reason)

    def _wait_on(self, what: socket.socket | None) -> None:
        """Set the socket that ``cancel`` has to shut down; raise if it was called already."""
        with self._lock:
            self._waits_on = what
            if self._cancelled is not None:
                raise CommunicatorAbortedError(self._cancelled)

    def _reach(self, call: Call, address: Address) -> socket.socket:
        address.check_reachable(self._name)
        try:
            return connect(
                address.host,
                address.port,
                call.deadline,
                before_attempt=self._wait_on,
                refusal_is_final=True,
            )
        except DistNetworkError as error:
            cause = error.__cause__
            if isinstance(cause, ConnectionRefusedError):
                text = f"{self._name} no longer listens: {error}"
                raise PeerLostError(text, self._peer) from error
            if call.deadline.expired:
                text = f"{call.header}: {self._name} could not be reached: {error}"
                raise CommunicatorTimeoutError(text, self._peer) from error
            raise

    def _greet(self, call: Call, address: Address, sock: socket.socket) -> socket.socket:
        membership = self._membership
        if self._number == 0:
            self.connections = connections_to(sock, self.connections)
        hello = Hello(
            bytes.fromhex(address.token),
            digest_of(membership.group),
            membership.rank,
            self._channel,
            self._number,
            self.connections,
        )
        runtime = membership.runtime
        welcomed = False
        try:
            if runtime.tls is not None:
                sock = runtime.tls.client(sock)
                self._wait_on(sock)
            # The hello follows the proof without waiting, which saves a round trip.
            authenticate(sock, runtime.secret, call.deadline, initiator=True, behind=hello.pack())
            recv_exact(sock, len(WELCOME), call.deadline)
            self._wait_on(None)
            welcomed = True
            return sock
        except (DistError, OSError) as error:
            if isinstance(error, AuthenticationError) and error.refused:
                raise
            cause = error.__cause__ if isinstance(error, AuthenticationError) else error
            if isinstance(cause, TimeoutError) and call.deadline.expired:
                text = f"{call.header}: {self._name} does not answer: {error}"
                raise CommunicatorTimeoutError(text, self._peer) from error
            if isinstance(cause, ConnectionError):
                text = f"{self._name} has left the group or died: it hung up ({error})"
                raise PeerLostError(text, self._peer) from error
            if is_out_of_reach(cause):
                text = f"{self._name} is out of reach: {error}"
                raise PeerLostError(text, self._peer, unreachable=True) from error
            raise
        finally:
            if not welcomed:
                with self._lock:
                    self._waits_on = None
                    sock.close()
