"""The listening address of a master, and servers that masters of one process share."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transport._errors import DistNetworkError
from transport._store.tcp.server import TCPStoreServer

if TYPE_CHECKING:
    from transport._net.tls import Tls


@dataclass(frozen=True, slots=True)
class ServerLease:
    """The right to use a server of this process, at ``address``, until ``close``.

    The server ends with its last lease.
    """

    address: tuple[str, int]
    close: Callable[[], None]
    """Must be called once."""


class _Tenants:
    """Servers that masters share, one for each port of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (pid, port) → (server, secret, leases). A fork inherits the table, but no server.
        self._servers: dict[tuple[int, int], tuple[TCPStoreServer, bytes | None, int]] = {}

    def lease(self, host: str, port: int, secret: bytes | None, tls: Tls | None) -> ServerLease:
        with self._lock:
            key = os.getpid(), port
            server, its_secret, leases = self._servers.get(key, (None, secret, 0))
            if its_secret != secret:
                raise ValueError(
                    f"secret differs from that of the store that already serves port {port};"
                    " tenants of one server must have the same secret"
                )
            if server is None:
                listen_at = listen_host(host, secret)
                server = TCPStoreServer(listen_at, port, secret=secret, tls=tls)
                key = os.getpid(), server.port
            self._servers[key] = server, secret, leases + 1
            return ServerLease(server.address, lambda: self._release(key))

    def _release(self, key: tuple[int, int]) -> None:
        with self._lock:
            server, secret, leases = self._servers[key]
            if leases > 1:
                self._servers[key] = server, secret, leases - 1
                return
            del self._servers[key]
        server.close()


_TENANTS = _Tenants()


def lease_server(
    host: str,
    port: int,
    secret: bytes | None,
    tls: Tls | None = None,
    *,
    shared: bool,
    listen_fd: int | None,
) -> ServerLease:
    """Return a lease on a server at ``host:port``: a new one, unless it may be ``shared``.

    If given, ``listen_fd`` is a listening socket to use instead, which the server then owns.
    Raises DistNetworkError if the port is not available or ``listen_fd`` is not a listening socket.
    """
    if shared and listen_fd is None:
        return _TENANTS.lease(host, port, secret, tls)
    if listen_fd is None:
        server = TCPStoreServer(listen_host(host, secret), port, secret=secret, tls=tls)
    else:
        try:
            listener = socket.socket(fileno=listen_fd)
        except OSError as error:
            raise DistNetworkError(
                f"master_listen_fd {listen_fd} is not a listening socket: {error}"
            ) from error
        server = TCPStoreServer(secret=secret, listener=listener, tls=tls)
    return ServerLease(server.address, server.close)


def listen_host(host: str, secret: bytes | None) -> str:
    """Return the listening address of a master that other hosts reach at ``host``.

    An address literal and the loopback's names are returned unchanged. Any other name may resolve
    differently here: many systems map their own name to a loopback address. So with a secret the
    master listens on all interfaces, and without one only on the name's address.
    """
    if not secret:
        return host
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return host
    except ValueError:
        pass
    return host if host == "localhost" or host.endswith(".localhost") else ""
