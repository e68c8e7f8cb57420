"""A rank's endpoint, which accepts the connections of all its groups."""

from __future__ import annotations

import hmac
import logging
import os
import resource
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from transport._net.acceptor import Acceptor
from transport._net.auth import HANDSHAKE_SECONDS
from transport._net.event_loop import EventLoop, sooner
from transport._net.sockets import listen
from transport._place import this_machine
from transport._tcp.meeting.address import Address
from transport._tcp.meeting.hello import HELLO_BYTES, Hello, digest_of

if TYPE_CHECKING:
    from transport._net.tls import Tls
    from transport._tcp.inbox import MessageWorker

_LOGGER = logging.getLogger("meshlib.transport")
_MAX_HELD = 1024
_MAX_CLOSED_GROUPS = 4096

Deliver = Callable[[Hello, socket.socket], None]
"""Called with each connection of a group, authenticated and non-blocking. Answers ``WELCOME`` or
closes the connection; must not block.
"""


@dataclass(slots=True, eq=False)
class _Newcomer:
    """An authenticated connection before its hello."""

    sock: socket.socket
    expires: float
    received: bytes = b""


class TcpEndpoint:
    """Listens on ``host`` in its own daemon thread until ``close``.

    It holds connections for groups that this rank has not made yet, at most ``max_held``, and drops
    the oldest for newer ones. The owner publishes ``address``. Raises DistNetworkError if it cannot
    listen on ``host``.
    """

    def __init__(
        self, secret: bytes | None, host: str, max_held: int = _MAX_HELD, tls: Tls | None = None
    ) -> None:
        listener = listen(host)
        token = os.urandom(16)
        self._token = token
        self.address = Address(host, listener.getsockname()[1], token.hex(), this_machine())
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_held = max(8, min(max_held, files // 4))
        # The lock guards state that other threads use as well; only the loop uses the rest.
        self._lock = threading.Lock()
        self._groups: dict[bytes, Deliver] = {}
        self._held: OrderedDict[socket.socket, Hello] = OrderedDict()
        self._closed_groups: OrderedDict[bytes, None] = OrderedDict()
        self._workers: list[MessageWorker] = []
        self._newcomers: OrderedDict[_Newcomer, None] = OrderedDict()
        name = f"meshlib-tcp-endpoint-{self.address.port}"
        self._loop = EventLoop(name, self._turn, self._end)
        self._selector = self._loop.selector
        self._acceptor = Acceptor(listener, secret, self._selector, self._welcome, tls)
        self._loop.start()

    def register(self, group: str, deliver: Deliver) -> None:
        """Call ``deliver`` with all connections of ``group``.

        The calling thread delivers earlier connections, and the endpoint's thread later ones.
        """
        digest = digest_of(group)
        with self._lock:
            self._groups[digest] = deliver
            waiting = [(sock, hello) for sock, hello in self._held.items() if hello.group == digest]
            for sock, _ in waiting:
                del self._held[sock]
        for sock, hello in waiting:
            deliver(hello, sock)

    def unregister(self, group: str) -> None:
        """Refuse the connections of ``group`` from now on. Idempotent."""
        digest = digest_of(group)
        with self._lock:
            self._groups.pop(digest, None)
            self._closed_groups[digest] = None
            if len(self._closed_groups) > _MAX_CLOSED_GROUPS:
                self._closed_groups.popitem(last=False)

    def attend(self, worker: MessageWorker) -> None:
        """Read messages for ``worker`` in this endpoint's thread while no thread waits for them."""
        with self._lock:
            self._workers.append(worker)
        self.wake()

    def wake(self) -> None:
        """Make the endpoint's thread call its workers. Thread-safe; never blocks."""
        self._loop.wake()

    def close(self) -> None:
        """Stop listening, and drop connections that were not delivered. Idempotent."""
        self._loop.stop()

    def __repr__(self) -> str:
        return f"TcpEndpoint({self.address.host!r}, port {self.address.port})"

    # The loop.

    def _turn(self) -> float | None:
        self._acceptor.expire()
        with self._lock:
            workers = list(self._workers)
            self._workers = [worker for worker in workers if not worker.closed]
        left = self._acceptor.seconds_to_wait()
        for worker in workers:
            left = sooner(left, worker.due(self._selector))
        return sooner(left, self._expire_newcomers())

    def _expire_newcomers(self) -> float | None:
        left: float | None = None
        while self._newcomers:
            oldest = next(iter(self._newcomers))
            left = oldest.expires - time.monotonic()
            if left > 0:
                break
            self._forget(oldest)
            self._refuse(oldest.sock, "it sent no hello in time")
            left = None
        return left

    def _end(self) -> None:
        self._acceptor.close()
        for newcomer in self._newcomers:
            newcomer.sock.close()
        with self._lock:
            self._groups.clear()
            for sock in self._held:
                sock.close()
            self._held.clear()
            workers = list(self._workers)
        for worker in workers:
            worker.closed = True
            worker.due(self._selector)

    def _welcome(self, sock: socket.socket) -> None:
        newcomer = _Newcomer(sock, time.monotonic() + HANDSHAKE_SECONDS)
        self._newcomers[newcomer] = None
        self._selector.register(sock, selectors.EVENT_READ, partial(self._on_newcomer, newcomer))
        self._on_newcomer(newcomer)

    def _on_newcomer(self, newcomer: _Newcomer, _events: int = 0) -> None:
        try:
            data = newcomer.sock.recv(HELLO_BYTES - len(newcomer.received))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        newcomer.received += data
        if data and len(newcomer.received) < HELLO_BYTES:
            return
        self._forget(newcomer)
        if data:
            self._pass_on(newcomer.sock, Hello.unpack(newcomer.received))
        else:
            self._refuse(newcomer.sock, "it hung up before its hello")

    def _forget(self, newcomer: _Newcomer) -> None:
        del self._newcomers[newcomer]
        self._selector.unregister(newcomer.sock)

    def _pass_on(self, sock: socket.socket, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token, self._token):
            self._refuse(sock, "it expects another endpoint, which used this port before")
            return
        with self._lock:
            deliver = self._groups.get(hello.group)
            if deliver is None:
                self._hold(sock, hello)
                return
        try:
            deliver(hello, sock)
        except Exception:
            _LOGGER.exception("a connection of a group could not be delivered")
            sock.close()

    def _hold(self, sock: socket.socket, hello: Hello) -> None:
        """Hold a connection until its group is made. The caller holds the lock."""
        if hello.group in self._closed_groups:
            self._refuse(sock, "its group is closed")
            return
        if len(self._held) >= self._max_held:
            self._refuse(self._held.popitem(last=False)[0], "too many wait for unknown groups")
        self._held[sock] = hello

    @staticmethod
    def _refuse(sock: socket.socket, reason: str) -> None:
        _LOGGER.info("refused a connection: %s", reason)
        sock.close()
