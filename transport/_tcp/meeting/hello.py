"""The connecting side's first message after authentication."""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import NamedTuple

_LAYOUT = struct.Struct("<16s32sIBBB")
HELLO_BYTES = _LAYOUT.size


WELCOME = b"\x01"
"""The answer to a hello, once the peer's communicator has accepted the connection."""


class TrafficKind(enum.IntEnum):
    """The purpose of a connection."""

    COLLECTIVE = 1
    POINT_TO_POINT = 2
    RPC = 4
    """Remote calls in one direction, and their replies in the other."""


class Hello(NamedTuple):
    """The receiving endpoint's token, the group's digest, the sender's group rank, and the
    ``TrafficKind``. ``number`` is the connection's index among the link's ``connections``.
    """

    token: bytes
    group: bytes
    rank: int
    channel: int
    number: int = 0
    connections: int = 1

    def pack(self) -> bytes:
        """Return the hello as ``HELLO_BYTES`` bytes."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Return the hello in ``HELLO_BYTES`` bytes."""
        return cls(*_LAYOUT.unpack(data))


def digest_of(group: str) -> bytes:
    """Return the SHA-256 digest of a group's name."""
    return hashlib.sha256(group.encode()).digest()
