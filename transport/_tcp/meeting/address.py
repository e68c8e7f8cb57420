"""A rank's listening address, and its publication to the other ranks."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict, dataclass

from transport import _environment as environment
from transport._communicators.runtime import Membership
from transport._errors import DistNetworkError
from transport._net import LOOPBACK
from transport._net.sockets import format_address, local_address_towards
from transport._place import this_machine
from transport._store.prefix_store import underlying


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one rank's endpoint, as published in a store.

    ``token`` (hexadecimal) is unique to the endpoint, so a process that reuses a dead process's
    port is not mistaken for it. ``machine`` shows on which machine a loopback address is valid.
    """

    host: str
    port: int
    token: str
    machine: str

    def encode(self) -> bytes:
        """Return the address as the bytes that are published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Return the address that ``data`` encodes; raise DistNetworkError if it is malformed."""
        try:
            fields = json.loads(data)
            address = cls(**fields)
            bytes.fromhex(address.token)
            if not (
                isinstance(address.host, str)  # pyright: ignore[reportUnnecessaryIsInstance]
                and isinstance(address.port, int)  # pyright: ignore[reportUnnecessaryIsInstance]
                and 0 < address.port <= 65535
            ):
                raise ValueError("the host or the port is invalid")
        except (ValueError, TypeError, RecursionError) as error:
            raise DistNetworkError(
                f"expected the address of a TCP endpoint in the store, got {data[:80]!r}"
            ) from error
        return address

    def check_reachable(self, name: str) -> None:
        """Raise DistNetworkError if this is a loopback address of another machine.

        ``name`` is the publishing rank's name in messages.
        """
        if is_loopback(self.host) and self.machine != this_machine():
            raise DistNetworkError(
                f"{name} listens on its machine's loopback only"
                f" ({format_address(self.host, self.port)}), and this rank is on another machine;"
                f" give the job a secret ({environment.SECRET}, or `meshlib secret` where the"
                " machines share a home). Or give each rank the address at"
                f" which others reach it ({environment.HOST})"
            )


def is_loopback(host: str) -> bool:
    """True if ``host`` (a name or an address) can be reached only from its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening_host(membership: Membership) -> str:
    """Return the host on which this rank listens, and at which its peers reach it.

    This is the runtime's ``host`` if set, else the address of the interface that leads to the
    store. Without an address of the store, or without a secret, it is the loopback.
    """
    runtime = membership.runtime
    if runtime.host is not None:
        return runtime.host
    address = underlying(membership.store).address
    if address is None:
        return LOOPBACK
    towards = local_address_towards(*address)
    return towards if runtime.secret is not None or is_loopback(towards) else LOOPBACK
