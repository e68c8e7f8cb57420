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
    """The address of one rank's endpoint, as it is published in a store.

    ``token`` (hexadecimal) is fresh for each endpoint. A process that reuses a dead process's port
    has another token, and so is not mistaken for it. ``machine`` tells whether a loopback address
    is our own.
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
        """Return the address in ``data``; raise DistNetworkError when there is none."""
        try:
            fields = json.loads(data)
            address = cls(**fields)
            bytes.fromhex(address.token)
            if not (
                isinstance(address.host, str)  # pyright: ignore[reportUnnecessaryIsInstance]
                and isinstance(address.port, int)  # pyright: ignore[reportUnnecessaryIsInstance]
                and 0 < address.port <= 65535
            ):
                raise ValueError("host or port is none")
        except (ValueError, TypeError, RecursionError) as error:
            raise DistNetworkError(
                f"expected the address of a TCP endpoint in the store, got {data[:80]!r}"
            ) from error
        return address

    def check_reachable(self, name: str) -> None:
        """Raise DistNetworkError when this is the loopback of another machine.

        ``name`` is the name in messages of the rank that published it.
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
    """True if ``host`` (a name or an address) is reached from its own machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listening_host(membership: Membership) -> str:
    """Return the host on which this rank listens, and at which its peers reach it.

    The runtime's ``host`` comes first, then the address of the interface that leads to the store.
    It is the loopback where the store has no address, or where the job has no secret that keeps
    strangers out.
    """
    runtime = membership.runtime
    if runtime.host is not None:
        return runtime.host
    address = underlying(membership.store).address
    if address is None:
        return LOOPBACK
    towards = local_address_towards(*address)
    return towards if runtime.secret is not None or is_loopback(towards) else LOOPBACK
