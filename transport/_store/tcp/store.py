"""A store served over TCP."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from types import EllipsisType
from typing import TYPE_CHECKING

from transport._checks import to_whole_number
from transport._errors import (
    AuthenticationError,
    DistError,
    DistStoreError,
    StoreTimeoutError,
)
from transport._net.auth import (
    HANDSHAKE_SECONDS,
    HandshakeInterruptedError,
    authenticate,
)
from transport._net.secret_file import secret_from_environment
from transport._net.sockets import connect, format_address
from transport._net.tls_choice import tls_from_environment
from transport._store.base import DEFAULT_STORE_TIMEOUT, Store
from transport._store.commands import Fields, Op
from transport._store.fields import pack_number
from transport._store.tcp.client import Breaker, StoreConnection
from transport._store.tcp.serving import ServerLease, lease_server
from transport._store.tcp.wire import Status
from transport._waiting.deadline import Deadline, Timeout
from transport._waiting.interrupts import next_slice

if TYPE_CHECKING:
    from transport._net.tls import Tls

_CLONE_SECONDS = 10.0
_PAUSE_SECONDS = 0.05


class TCPStore(Store):
    """A client of a store server; with ``is_master`` also the server.

    Args:
        host_name: The server's host. The master listens on this address. If it is a name other than
            the loopback's, and there is a secret, the master listens on all interfaces.
        port: The server's port; 0, for the master only, lets the kernel choose (see ``port``).
        world_size: The number of stores that will connect, including the master; None: unknown.
        is_master: Serve the store.
        timeout: The limit for the connection and for every later wait; seconds or a timedelta.
        wait_for_workers: The master waits until ``world_size`` stores have connected.
        multi_tenant: Masters of this process with the same port share one server.
        master_listen_fd: A listening socket's descriptor for the master to serve and own; the port
            is the socket's.
        use_libuv: Accepted for compatibility with c10d and ignored.
        secret: The job's secret; default: from the environment, see ``transport._environment``.
        tls: The TLS configuration; default: from the environment.

    Several threads may use one object; their waits do not delay each other. Raises DistNetworkError
    if the server cannot be reached or the port is in use, AuthenticationError if the secrets
    differ, StoreTimeoutError if workers are missing, ValueError and TypeError for wrong arguments.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: Timeout = DEFAULT_STORE_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        secret: bytes | EllipsisType | None = ...,
        tls: Tls | EllipsisType | None = ...,
    ) -> None:
        super().__init__(timeout)
        _check_arguments(host_name, port, world_size, is_master, master_listen_fd)
        if isinstance(secret, str):
            raise TypeError("secret must be bytes, got str")
        self._host = host_name
        self._secret = secret_from_environment() if isinstance(secret, EllipsisType) else secret
        self._tls = tls_from_environment() if isinstance(tls, EllipsisType) else tls
        self._world_size = world_size
        self._close_lock = threading.Lock()
        self._closed = True
        self._has_will = False
        self._grace: float | None = None
        self._breaker: Breaker | None = None
        self._lease: ServerLease | None = None
        deadline = Deadline.after(timeout)
        address = (host_name, port)
        with ExitStack() as undo:
            if is_master:
                self._lease = lease_server(
                    host_name,
                    port,
                    self._secret,
                    self._tls,
                    shared=multi_tenant,
                    listen_fd=master_listen_fd,
                )
                undo.callback(self._lease.close)
                address = self._lease.address
            self._address = address
            self._connection = self._connect(deadline)
            undo.callback(self._connection.close)
            self._join(deadline, wait=is_master and wait_for_workers)
            undo.pop_all()
        self._closed = False

    @property
    def host(self) -> str:
        """The ``host_name`` argument."""
        return self._host

    @property
    def serves(self) -> bool:
        """True if this is the master: other ranks' stores end with it."""
        return self._lease is not None

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self._address[1]

    @property
    def address(self) -> tuple[str, int]:
        """The ``host_name`` argument, and the server's port."""
        return self._host, self.port

    @property
    def world_size(self) -> int | None:
        """The ``world_size`` argument."""
        return self._world_size

    def with_grace(self, seconds: float) -> TCPStore:
        """Return this store over the same connection, for callers that cannot wait for a silent
        server.

        Its calls raise ``DistStoreError`` if an answer is late by more than ``seconds``.
        """
        other = copy(self)
        other._closed = True  # so that its close() does nothing
        other._grace = seconds
        return other

    def aside(self) -> TCPStore:
        """Return this store over the same connection. Its ``hang_up`` ends its own waits only.

        If the server is silent, ``hang_up`` may take a second to do so.
        """
        other = copy(self)
        other._closed = True  # so that its close() does nothing
        other._breaker = Breaker()
        other._ends, other._last_end = {}, []
        return other

    def clone(self) -> TCPStore:
        """Return a client with its own connection, which does not serve the store.

        Raises DistStoreError if this store is closed.
        """
        if self._closed:
            raise DistStoreError(f"{self.describe()} is closed")
        # The server is known to listen, so a refused connection is not retried for long.
        seconds = min(self._timeout, _CLONE_SECONDS)
        other = TCPStore(*self._address, timeout=seconds, secret=self._secret, tls=self._tls)
        other.set_timeout(self._timeout)
        other._host = self._host
        return other

    def end_waits(self, error: DistError | None, by: object = None) -> None:
        super().end_waits(error, by)
        self._connection.end_waits(bool(self._ends), self._breaker)

    def hang_up(self) -> None:
        if self._breaker is None:
            self._connection.hang_up()
        else:
            self._connection.end_waits_of(self._breaker)

    def close(self) -> None:
        """End the connection and its waits; a master also ends an unshared server."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        # A goodbye only withdraws the will; without one, skip its delay.
        self._connection.close(goodbye=self._has_will)
        if self._lease is not None:
            self._lease.close()

    def describe(self) -> str:
        return f"TCPStore({format_address(self._host, self._address[1])})"

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if getattr(self, "_closed", True):
            return
        _warn(f"unclosed {self.describe()}", ResourceWarning, source=self)
        self._closed = True
        # No goodbye: this also runs in a process that dies of an exception.
        self._connection.close(goodbye=False)
        if self._lease is not None:
            self._lease.close()

    def _connect(self, deadline: Deadline) -> StoreConnection:
        hung_up = False
        while True:
            sock = connect(*self._address, deadline)
            # A listener that accepts and then is silent for this time is not a store.
            handshake = Deadline.after(min(deadline.remaining(), HANDSHAKE_SECONDS))
            connected = False
            try:
                if self._tls is not None:
                    sock = self._tls.client(sock)
                authenticate(sock, self._secret, handshake, initiator=True)
                connected = True
                return StoreConnection(sock, self.describe())
            except AuthenticationError as error:
                if isinstance(error.__cause__, TimeoutError) and handshake.expired:
                    where = format_address(*self._address)
                    raise AuthenticationError(
                        f"{error}. It accepted the connection: perhaps a program other than this"
                        f" job's store listens at {where}",
                        refused=False,
                    ) from error.__cause__
                # A server with too many unauthenticated connections, or one that is closing, hangs
                # up as if it refused the proof. Only a second hang-up counts as a refusal.
                unclear = not hung_up and isinstance(error.__cause__, ConnectionError)
                if not isinstance(error, HandshakeInterruptedError) and not unclear:
                    raise
                hung_up = hung_up or unclear
                if deadline.remaining() <= _PAUSE_SECONDS:
                    raise
                time.sleep(next_slice(_PAUSE_SECONDS))
            finally:
                if not connected:
                    sock.close()

    def _join(self, deadline: Deadline, *, wait: bool) -> None:
        if self._world_size is None:
            return
        if not wait:
            self._post(Op.JOIN, ())
            return
        if int(self._request(Op.JOIN, ())[0]) >= self._world_size:
            return
        fields = (pack_number(self._world_size),)
        seconds = deadline.remaining()
        status, _ = self._connection.request(Op.WAIT_WORKERS, fields, seconds)
        if status == Status.TIMEOUT:
            joined = int(self._request(Op.NUM_WORKERS, ())[0])
            raise StoreTimeoutError(
                f"{self.describe()}: waited {deadline.seconds:g} s for workers:"
                f" {joined} of {self._world_size} have connected"
            )

    def _request(self, op: Op, fields: Fields) -> Fields:
        seconds = self._timeout if self._grace is None else 0.0
        return self._connection.request(op, fields, seconds, self._grace, self._breaker)[1]

    def _post(self, op: Op, fields: Fields) -> None:
        self._connection.post(op, fields)

    def _await(self, op: Op, fields: Fields, timeout: Timeout | None) -> Fields:
        deadline = Deadline.after(self._seconds(timeout))
        status, answer = self._connection.request(
            op, fields, deadline.seconds, self._grace, self._breaker
        )
        if status == Status.TIMEOUT:
            raise self._wait_error(op, answer, deadline)
        return answer

    def _will(self, key: bytes, value: bytes) -> bool:
        self._has_will = True
        self._request(Op.SET_WILL, (key, value))
        return True


def _check_arguments(
    host_name: str, port: int, world_size: int | None, is_master: bool, listen_fd: int | None
) -> None:
    if not isinstance(host_name, str) or not host_name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"host_name must be a host's name or address, got {host_name!r}")
    if not 0 <= to_whole_number(port, "port") <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    if port == 0 and not is_master:
        raise ValueError("port must be the master's port; 0 (any) is for the master itself")
    if listen_fd is not None and not is_master:
        raise ValueError(f"master_listen_fd is for the master, got {listen_fd} without is_master")
    if world_size is not None and to_whole_number(world_size, "world_size") < 1:
        raise ValueError(f"world_size must be at least 1 or None, got {world_size}")
