"""The server of TCPStores: one thread, one selector, no blocking calls.

The server holds the waits: clients do not poll, and are answered once their keys exist. When a
client disappears without a goodbye, the server appends its will to the key that the will names.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import selectors
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING

from transport._errors import DistNetworkError, DistStoreError
from transport._net import LOOPBACK
from transport._net.acceptor import Acceptor
from transport._net.event_loop import EventLoop, sooner
from transport._net.sockets import format_address, listen
from transport._net.tls_choice import tls_from_environment
from transport._store.commands import Commands, Fields, Op
from transport._store.fields import WireError, unpack_fields, unpack_number
from transport._store.table import StoreTable, Waiter
from transport._store.tcp.wire import REQUEST, Frames, Status, pack_reply
from transport._waiting.deadline import LONGEST_WAIT

if TYPE_CHECKING:
    from transport._net.tls import Tls

_LOGGER = logging.getLogger("meshlib.transport")
_RECEIVE_BYTES = 1 << 18
# The server stops reading from a client with this many unread bytes.
_MAX_UNSENT = 1 << 26


@dataclass(slots=True, eq=False)
class _Client:
    """An authenticated connection with its unsent answers, waits and will."""

    sock: socket.socket
    frames: Frames = field(default_factory=lambda: Frames(REQUEST))
    unsent: bytearray = field(default_factory=bytearray)
    waits: dict[int, _Wait] = field(default_factory=dict[int, "_Wait"])
    will: tuple[bytes, bytes] | None = None
    events: int = selectors.EVENT_READ
    mute: bool = False
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Wait:
    """A request whose answer is sent later: by its table, at ``expires``, or never."""

    client: _Client
    number: int
    expires: float
    pending: tuple[StoreTable, Waiter] | None = None


class TCPStoreServer:
    """Serves a store from its own daemon thread until ``close``.

    ``host`` None means the loopback without a ``secret``, all interfaces (like ``""``) with one.
    If ``port`` is 0, the kernel chooses one: see ``.port``. A listening socket as ``listener``
    replaces both. ``tls`` defaults to the environment's. Raises DistNetworkError if the port is in
    use.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int = 0,
        *,
        secret: bytes | None = None,
        listener: socket.socket | None = None,
        tls: Tls | EllipsisType | None = ...,
    ) -> None:
        if isinstance(tls, EllipsisType):
            tls = tls_from_environment()
        if listener is None:
            listener = listen("" if host is None and secret else host, port)
        elif not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            error = DistNetworkError(f"listener must be a listening socket, got {listener!r}")
            listener.close()
            raise error
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self._reached_at = _reached_at(listener)
        self._commands = Commands()
        self._clients: set[_Client] = set()
        self._dirty: dict[_Client, None] = {}
        # (time, tie breaker, wait), including waits that were answered: see _prune.
        self._timers: list[tuple[float, int, _Wait]] = []
        self._parked = 0
        self._count = itertools.count()
        self._loop = EventLoop(f"meshlib-store-server-{self.port}", self._turn, self._end)
        self._selector = self._loop.selector
        self._acceptor = Acceptor(listener, secret, self._selector, self._welcome, tls)
        self._loop.start()

    @property
    def address(self) -> tuple[str, int]:
        """The server's address, as seen from this machine."""
        return self._reached_at, self.port

    def close(self) -> None:
        """Stop serving: clients' calls fail with ``DistStoreError``. Idempotent."""
        self._loop.stop()

    def __repr__(self) -> str:
        return f"TCPStoreServer({format_address(self.host, self.port)})"

    # The loop.

    def _turn(self) -> float | None:
        self._acceptor.expire()
        left: float | None = None
        if self._timers:
            self._expire_waits()
        if self._timers:
            left = min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_WAIT)
        return sooner(self._acceptor.seconds_to_wait(), left)

    def _end(self) -> None:
        self._acceptor.close()
        for client in self._clients:
            client.sock.close()
        self._clients.clear()

    def _welcome(self, sock: socket.socket) -> None:
        client = _Client(sock)
        self._clients.add(client)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._on_client, client))

    def _on_client(self, client: _Client, events: int) -> None:
        if client.closed:
            return
        if events & selectors.EVENT_READ:
            try:
                self._read(client)
            except Exception:  # noqa: BLE001 (a bug must not affect other clients)
                self._dismiss(client)
        else:
            self._dirty[client] = None
        self._flush_all()

    def _flush_all(self) -> None:
        while self._dirty:
            client = self._dirty.popitem()[0]
            try:
                self._flush(client)
            except Exception:  # noqa: BLE001 (a bug must not affect other clients)
                self._dismiss(client)

    def _dismiss(self, client: _Client) -> None:
        """Drop a client after an unexpected error, and continue to serve the others."""
        _LOGGER.exception("%r dropped a client", self)
        if not client.closed:
            self._drop(client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.sock.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        try:
            for frame in client.frames.feed(data):
                self._handle(client, frame)
                if client.closed:
                    return
        except WireError as error:
            _LOGGER.warning("%r dropped a client: %s", self, error)
            self._drop(client)

    def _handle(self, client: _Client, frame: bytes) -> None:
        _, number, op, timeout = REQUEST.unpack_from(frame)
        fields = unpack_fields(frame, REQUEST.size, len(frame))
        commands = self._commands
        try:
            if (answer := commands.answer(op, fields)) is not None:
                self._reply(client, number, Status.OK, answer)
            elif op == Op.SET_WILL:
                key, value = fields
                client.will = (key, value)
                self._reply(client, number, Status.OK, ())
            elif op == Op.CANCEL:
                self._end_wait(client, unpack_number(*fields))
            elif op == Op.GOODBYE:
                client.will = None
                self._drop(client)
            else:
                self._park(client, number, timeout, op, fields)
        except (DistStoreError, MemoryError) as error:
            self._reply(client, number, Status.ERROR, ((str(error) or repr(error)).encode(),))
        except (TypeError, ValueError) as error:
            raise WireError(f"request with opcode {op}: {error}") from error

    def _reply(self, client: _Client, number: int, status: Status, fields: Fields) -> None:
        if not client.mute:
            client.unsent += pack_reply(number, status, fields)
            self._dirty[client] = None

    def _flush(self, client: _Client) -> None:
        if client.closed:
            return
        unsent = client.unsent
        if unsent:
            try:
                sent = client.sock.send(unsent)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                # The client does not read any more. Its earlier requests, such as a goodbye, count.
                client.mute = True
                sent = len(unsent)
            del unsent[:sent]
        events = selectors.EVENT_READ
        if unsent:
            events = selectors.EVENT_WRITE
            if len(unsent) < _MAX_UNSENT:
                events |= selectors.EVENT_READ
        if events != client.events:
            client.events = events
            self._selector.modify(client.sock, events, partial(self._on_client, client))

    def _drop(self, client: _Client) -> None:
        client.closed = True
        self._clients.discard(client)
        self._dirty.pop(client, None)
        self._selector.unregister(client.sock)
        client.sock.close()
        for number in list(client.waits):
            self._cancel(client, number)
        if client.will is not None:
            key, value = client.will
            self._commands.table.append(key, value)

    # Waits.

    def _park(self, client: _Client, number: int, timeout: float, op: int, fields: Fields) -> None:
        if number in client.waits or not timeout >= 0:
            raise WireError(f"request {number} with timeout {timeout} cannot wait")
        wait = _Wait(client, number, time.monotonic() + timeout)
        deliver = partial(self._deliver, wait)
        wait.pending = table, waiter = self._commands.waiter(op, fields, deliver)
        client.waits[number] = wait
        self._parked += 1
        if not table.submit(waiter) and timeout < math.inf:
            heapq.heappush(self._timers, (wait.expires, next(self._count), wait))
            self._prune()

    def _cancel(self, client: _Client, number: int) -> None:
        wait = client.waits.get(number)
        if wait is not None and wait.pending is not None:
            table, waiter = wait.pending
            table.withdraw(waiter)
            self._forget(wait)

    def _end_wait(self, client: _Client, number: int) -> None:
        """Answer a wait with a timeout and its missing keys."""
        wait = client.waits.get(number)
        if wait is not None and wait.pending is not None:
            table, waiter = wait.pending
            missing = waiter.missing(table)
            self._cancel(client, number)
            self._reply(client, number, Status.TIMEOUT, missing)

    def _deliver(self, wait: _Wait, waiter: Waiter) -> None:
        self._reply(wait.client, wait.number, Status.OK, waiter.values)
        self._forget(wait)

    def _forget(self, wait: _Wait) -> None:
        if wait.client.waits.pop(wait.number, None) is not None:
            self._parked -= 1
        wait.pending = None

    def _expire_waits(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            wait = heapq.heappop(self._timers)[2]
            if wait.pending is None:
                continue
            self._end_wait(wait.client, wait.number)
        self._flush_all()

    def _prune(self) -> None:
        """Limit the heap to a constant factor of the number of waits."""
        if len(self._timers) > 64 + 2 * self._parked:
            self._timers = [entry for entry in self._timers if entry[2].pending is not None]
            heapq.heapify(self._timers)


def _reached_at(listener: socket.socket) -> str:
    """Return the host at which processes of this machine reach ``listener``."""
    host = str(listener.getsockname()[0])
    if host == "::":
        alone = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return "::1" if alone else LOOPBACK
    return LOOPBACK if host == "0.0.0.0" else host  # noqa: S104 (compared, not bound)
