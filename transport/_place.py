"""The place of a rank, by which ranks find out who can share memory with them."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from transport import _environment as environment
from transport._errors import DistNetworkError
from transport._native import core, why_not

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/net"
_MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place, as published in a store.

    ``machine`` is the rank's ``this_machine()``. Ranks with equal machines share memory, unless
    one of them has an ``obstacle``, the reason why it cannot. Ranks that are threads of one process
    have the same ``pid``. ``address`` is that of the rank's abstract Unix socket, in hexadecimal,
    if it has one. ``site`` is the rank's ``MESHLIB_SITE``.
    """

    machine: str
    obstacle: str = ""
    pid: int = 0
    address: str = ""
    site: str = ""

    def encode(self) -> bytes:
        """Return the place as the bytes that are published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Place:
        """Return the place that ``data`` encodes; raise DistNetworkError if it is malformed."""
        try:
            fields = json.loads(data)
            place = cls(**fields)
            bytes.fromhex(place.address)
        except (ValueError, TypeError, KeyError) as error:
            raise DistNetworkError(
                f"expected the place of a rank in the store, got {data[:80]!r}"
            ) from error
        return place

    def may_share_with(self, other: Place) -> bool:
        """True if no known obstacle prevents sharing memory with the rank at ``other``."""
        return not self.obstacle and not other.obstacle and self.machine == other.machine


def this_place(address: bytes = b"") -> Place:
    """Return this process's place, with the ``address`` of its Unix socket if it has one."""
    obstacle = unsupported_reason()
    try:
        machine = _boot_and_namespace()
    except OSError as error:
        machine = this_machine()
        obstacle = obstacle or f"cannot read the boot id and the network namespace: {error}"
    site = os.environ.get(environment.SITE, "")
    return Place(machine, obstacle or "", os.getpid(), address.hex(), site)


def unsupported_reason() -> str | None:
    """Return why this process cannot share memory, and how to fix that; None if it can."""
    if not sys.platform.startswith("linux"):
        return f"the shared-memory transport needs Linux, this is {sys.platform}"
    machine = platform.machine()
    if machine not in _MACHINES or sys.maxsize != 2**63 - 1:
        expected = ", ".join(_MACHINES)
        return f"the shared-memory transport supports only {expected}, this is {machine}"
    if core is None:
        return f"the shared-memory transport needs the compiled core: {why_not}"
    return None


def this_machine() -> str:
    """Return an id that all processes with the same loopback interface share.

    It consists of the kernel's boot id and the network namespace, in which socket addresses are
    valid. Two namespaces of one machine count as two machines. Host names are not unique.
    """
    try:
        return _boot_and_namespace()
    except OSError:
        return socket.gethostname()


def _boot_and_namespace() -> str:
    return f"{_BOOT_ID.read_text().strip()} {os.readlink(_NAMESPACE)}"
