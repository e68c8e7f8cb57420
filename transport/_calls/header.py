"""The header of a call: the properties that must be equal on every member, in 32 bytes.

Each frame between two members begins with the header of its call. The receiver compares the header
with its own before it uses the payload, so the first frame reveals that two ranks are in different
calls.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from transport._calls.codes import dtype_name, op_name

_LAYOUT = struct.Struct("<QQiHHBBHI")
HEADER_BYTES = _LAYOUT.size
NO_ROOT = -1
pack_header = _LAYOUT.pack
"""``pack_header(*header)`` equals ``CallHeader(*header).pack()``, without creating a header."""


_PRIME = 65521  # The largest prime that fits the 16 bits of a history.


def history_after(packed: bytes) -> int:
    """Return the ``history`` of the collective after the one with the header ``packed``."""
    return int.from_bytes(packed, "little") % _PRIME


class Kind(enum.IntEnum):
    """The kind of call that a frame belongs to: a collective, or a point-to-point message."""

    BARRIER = 1
    BROADCAST = 2
    ALL_REDUCE = 3
    REDUCE = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    GATHER = 7
    SCATTER = 8
    ALL_TO_ALL = 9
    SEND = 10
    RECV = 11
    ALLOCATE = 12
    SPLIT = 13
    MONITORED_BARRIER = 14
    CALL = 15
    """A remote call on the caller's side. Headers of this kind are recorded, never sent."""
    SERVE = 16
    """A remote call on the callee's side. Recorded, never sent."""
    REFUSED = 17
    """A collective of kind ``extra`` that raised before it sent anything: numbered and recorded."""
    SCAN = 18
    EXSCAN = 19
    """A scan without the member's own contribution."""
    WINDOW = 20
    """The collective that creates a one-sided window."""
    PUT = 21
    """This kind and all below: blocking operations of one member on another member's window."""
    GET = 22
    UPDATE = 23
    FLUSH = 24
    LOCK = 25
    WAIT_SIGNAL = 26


ONE_SIDED = frozenset(kind for kind in Kind if kind >= Kind.PUT)


def kind_name(code: int) -> str:
    """Return the name of the kind ``code``, which may be unknown because a peer sent it."""
    try:
        return Kind(code).name.lower()
    except ValueError:
        return f"kind {code}"


class CallHeader(NamedTuple):
    """The part of a call that must be equal on every member.

    ``elements`` is 0 unless all members must have the same number of elements. ``root`` is a group
    rank or ``NO_ROOT``. The codes ``dtype`` and ``op`` are those of ``dtype_code`` and ``ReduceOp``
    (0: none). ``extra`` is a hash of other values that must be equal (0: none).

    ``history`` is a hash of the earlier collectives (see ``history_after``). It reveals earlier
    calls that differed without exchanging a frame.
    """

    sequence: int
    elements: int
    root: int
    kind: int
    dtype: int
    op: int
    flags: int = 0
    history: int = 0
    extra: int = 0

    @property
    def what(self) -> CallHeader:
        """The header without its history."""
        return self._replace(history=0)

    def pack(self) -> bytes:
        """Return the header's wire format, ``HEADER_BYTES`` bytes."""
        return pack_header(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> CallHeader:
        """Return the header that the first ``HEADER_BYTES`` bytes of ``data`` encode."""
        return cls(*_LAYOUT.unpack_from(data))

    def __str__(self) -> str:
        if self.kind == Kind.REFUSED:
            return f"call #{self.sequence} {kind_name(self.extra)}, refused"
        kind = kind_name(self.kind)
        parts = [f"call #{self.sequence} {kind}"]
        if self.dtype:
            parts.append(f"dtype={dtype_name(self.dtype)}")
        if self.elements:
            parts.append(f"count={self.elements}")
        if self.op:
            parts.append(f"op={op_name(self.op)}")
        if self.root != NO_ROOT:
            parts.append(f"root={self.root} (group rank)")
        if self.kind in (Kind.SEND, Kind.RECV):
            parts.append(f"tag={self.extra}")
        elif self.extra:
            parts.append(f"sizes={self.extra:08x} (hash)")
        return " ".join(parts)
