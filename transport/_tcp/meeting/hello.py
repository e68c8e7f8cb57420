"""The first message of the connecting side, once both sides have authenticated."""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import NamedTuple

_LAYOUT = struct.Struct("<16s32sIBBB")
HELLO_BYTES = _LAYOUT.size


WELCOME = b"\x01"
"""The answer to a hello, once the group's communicator there has the connection."""


class TrafficKind(enum.IntEnum):
    """The traffic of a connection."""

    COLLECTIVE = 1
    POINT_TO_POINT = 2
    RPC = 4
    """Remote calls one way, and their replies the other."""


class Hello(NamedTuple):
    """The receiving endpoint's token, the group's digest, the sender's group rank, and the
    connection's ``TrafficKind``. It is number ``number`` of the link's ``connections``.
    """

    token: bytes
    group: bytes
    rank: int
    channel: int
    number: int = 0
    connections: int = 1

    def pack(self) -> bytes:
        """Return the message, ``HELLO_BYTES`` bytes."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """Return the hello in ``HELLO_BYTES`` bytes."""
        return cls(*_LAYOUT.unpack(data))


def digest_of(group: str) -> bytes:
    """Return a group's name as 32 bytes."""
    return hashlib.sha256(group.encode()).digest()
