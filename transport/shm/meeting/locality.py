"""Who can share memory with whom: facts about this process that its peers compare."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from transport.errors import DistNetworkError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/net"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs, as it is published in the store.

    ``boot`` names the running kernel, ``namespace`` the network namespace in which ``address`` (an
    abstract Unix socket, hexadecimal) means something. Two ranks with equal ``boot`` and
    ``namespace`` *may* share memory; they do when a descriptor has really arrived. ``obstacle`` is
    empty, or says why this rank cannot use shared memory at all. ``pid`` tells ranks that are
    threads of one process from others.
    """

    boot: str
    namespace: str
    pid: int
    address: str
    obstacle: str

    def encode(self) -> bytes:
        """Return the place as the bytes that are published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Place:
        """Return the place in ``data``; raise DistNetworkError when there is none."""
        try:
            place = cls(**json.loads(data))
            bytes.fromhex(place.address)
        except (ValueError, TypeError) as error:
            raise DistNetworkError(
                f"expected the place of a rank in the store, got {data[:80]!r}"
            ) from error
        return place

    def may_share_with(self, other: Place) -> bool:
        """Whether memory can be shared with the rank at ``other``, as far as can be told."""
        return (
            not self.obstacle
            and not other.obstacle
            and (self.boot, self.namespace) == (other.boot, other.namespace)
        )


def this_place(address: bytes, obstacle: str | None, namespace: str | None = None) -> Place:
    """Return this process's place; ``obstacle`` says why it cannot share memory, if it cannot,
    ``namespace`` what it is to say instead of where it is.
    """
    try:
        boot, namespace = _BOOT_ID.read_text().strip(), namespace or os.readlink(_NAMESPACE)
    except OSError as error:
        boot = namespace = ""
        obstacle = obstacle or f"this machine does not say which boot and namespace it is: {error}"
    return Place(boot, namespace, os.getpid(), address.hex(), obstacle or "")
