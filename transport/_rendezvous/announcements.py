"""Announcements in a multicast group, by which a job's processes find the server of its store."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from transport._errors import DistNetworkError
from transport._net import LOOPBACK
from transport._net.fork import close_in_forked_children
from transport._net.sockets import format_address
from transport._waiting.interrupts import next_slice

_MAGIC = b"meshlib announcement 1"
_PROOF_BYTES = hashlib.sha256().digest_size
_MAX_BYTES = 1200
_LOOPBACK_6 = "::1"


@dataclass(frozen=True, slots=True)
class Announcement:
    """A process's announcement. If it serves a store, ``host`` and ``port`` are the address.

    An empty ``host`` means the sender of the datagram. With ``port`` 0, the process serves none.
    """

    group: str
    identity: str
    host: str = ""
    port: int = 0

    def pack(self, secret: bytes | None) -> bytes:
        """Return the datagram, with a proof of the job's secret."""
        body = json.dumps(asdict(self)).encode()
        return _MAGIC + _proof(secret, body) + body

    @classmethod
    def unpack(cls, data: bytes, secret: bytes | None) -> Announcement | None:
        """Return the announcement in a datagram, or None if it does not belong to this job."""
        size = len(_MAGIC) + _PROOF_BYTES
        body = data[size:]
        if data[: len(_MAGIC)] != _MAGIC or len(data) > _MAX_BYTES:
            return None
        if not hmac.compare_digest(data[len(_MAGIC) : size], _proof(secret, body)):
            return None
        try:
            fields: dict[str, Any] = json.loads(body)
            group, identity, host = fields["group"], fields["identity"], fields["host"]
            port = fields["port"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        fits = all(isinstance(text, str) for text in (group, identity, host))
        if not fits or not isinstance(port, int) or not 0 <= port < 65536:
            return None
        return cls(group, identity, host, port)


def new_identity() -> str:
    """Return a new unique identity."""
    return os.urandom(16).hex()


class MulticastSocket:
    """Sends and receives the announcements of one job in the multicast group ``host:port``.

    Without ``secret`` and ``interface`` (an address of this machine), datagrams stay on this host.
    ``listen_host``, the host on which to serve the store, is then the loopback address. Raises
    DistNetworkError if this machine cannot reach the group.
    """

    def __init__(
        self, host: str, port: int, group: str, secret: bytes | None, interface: str | None
    ) -> None:
        self._address = (host, port)
        self._group = group
        self._secret = secret
        local = not secret and not interface
        version_4 = ipaddress.ip_address(host.partition("%")[0]).version == 4
        loopback = LOOPBACK if version_4 else _LOOPBACK_6
        self.listen_host = interface or (loopback if local else "")
        self.announced_host = loopback if local else interface or ""
        # Not every machine routes multicast over its loopback, so the first working route is used.
        routes = [
            *([loopback] if local else []),
            *([interface] if interface else [None]),
        ]
        failure: OSError | None = None
        for route in routes:
            try:
                self._sock = _open(host, port, route, local=local)
            except OSError as error:
                failure = error
            else:
                close_in_forked_children(self._sock)
                return
        raise DistNetworkError(
            f"no route to the multicast group {format_address(host, port)}: {failure}"
        ) from failure

    def send(self, announcement: Announcement) -> None:
        """Send an announcement. Like any datagram, it may be lost, even by a local error."""
        with contextlib.suppress(OSError):
            self._sock.sendto(announcement.pack(self._secret), self._address)

    def receive(self, seconds: float, handle: Callable[[Announcement], bool]) -> None:
        """Pass arriving announcements to ``handle`` for ``seconds``, or until it returns True."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._sock], [], [], next_slice(left))[0]:
                continue
            with contextlib.suppress(OSError):
                data, address = self._sock.recvfrom(_MAX_BYTES + 1)
                announcement = Announcement.unpack(data, self._secret)
                if announcement is None or announcement.group != self._group:
                    continue
                host = announcement.host or str(address[0])
                if handle(
                    Announcement(announcement.group, announcement.identity, host, announcement.port)
                ):
                    return

    def close(self) -> None:
        """Leave the multicast group."""
        self._sock.close()


def _proof(secret: bytes | None, body: bytes) -> bytes:
    return hmac.digest(secret or b"", _MAGIC + body, "sha256")


def _open(host: str, port: int, route: str | None, *, local: bool) -> socket.socket:
    """Return a socket in the multicast group. ``route`` is the address of an interface to use."""
    bare = host.partition("%")[0]
    interface: int | bytes
    if ipaddress.ip_address(bare).version == 4:
        interface = socket.inet_aton(route or "0.0.0.0")  # noqa: S104 (the kernel's choice)
        address, membership = (host, port), socket.inet_aton(host) + interface
        family, level = socket.AF_INET, socket.IPPROTO_IP
        join, outgoing = socket.IP_ADD_MEMBERSHIP, socket.IP_MULTICAST_IF
        hops = socket.IP_MULTICAST_TTL
    else:
        # The suffix %interface of an address overrides the routing table's choice.
        name = "lo" if route == _LOOPBACK_6 else (route or host).partition("%")[2]
        interface = socket.if_nametoindex(name) if name else 0
        address = host, port, 0, interface
        membership = socket.inet_pton(socket.AF_INET6, bare) + struct.pack("@I", interface)
        family, level = socket.AF_INET6, socket.IPPROTO_IPV6
        join, outgoing = socket.IPV6_JOIN_GROUP, socket.IPV6_MULTICAST_IF
        hops = socket.IPV6_MULTICAST_HOPS
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setsockopt(level, join, membership)
        sock.setsockopt(level, outgoing, interface)
        sock.setsockopt(level, hops, 0 if local else 1)
        sock.sendto(b"", address)
    except OSError:
        sock.close()
        raise
    return sock
