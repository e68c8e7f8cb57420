"""The description of a call: the communicator receives it, and its header travels on the wire.

Each frame between two members begins with the header of its call. The receiver compares these 32
bytes with its own header before it uses a value. So ranks in different calls learn it from the
first frame.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

from transport._deadline import Deadline
from transport._native import core

if TYPE_CHECKING:
    import numpy as np

    from transport._cuda.flat import Completion

_LAYOUT = struct.Struct("<QQiHHBBHI")
HEADER_BYTES = _LAYOUT.size
NO_ROOT = -1
pack_header = _LAYOUT.pack
"""``pack_header(*header)`` equals ``CallHeader(*header).pack()``, without making a header."""


_PRIME = 65521  # the largest that a history holds: no two headers that differ in 16 bits are alike


def history_after(packed: bytes) -> int:
    """Return the ``history`` of the collective after the one whose header is ``packed``."""
    return int.from_bytes(packed, "little") % _PRIME


class Kind(enum.IntEnum):
    """What a frame belongs to: a collective by its name, or a point-to-point message."""

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
    """A remote call, by its caller; such headers are only recorded."""
    SERVE = 16
    """A remote call, by its callee."""
    REFUSED = 17
    """A collective of kind ``extra`` that its caller refused: recorded and numbered, never sent."""


def kind_name(code: int) -> str:
    """Return the name of a kind. A peer may send an unknown code."""
    try:
        return Kind(code).name.lower()
    except ValueError:
        return f"kind {code}"


class CallHeader(NamedTuple):
    """The part of a call that must be equal on every member.

    The number ``elements`` is 0 unless all members must agree on one. A ``root`` is a group rank or
    ``NO_ROOT``. The codes ``dtype`` and ``op`` are those of ``dtype_code`` and ``ReduceOp`` (0:
    none). Other values that must agree are hashed in ``extra`` (0: none).

    ``history`` is a hash of the earlier collectives (see ``history_after``). If members made
    different ones without exchanging a frame, the next frame shows it.
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
        """Return the header as the ``HEADER_BYTES`` bytes that travel."""
        return pack_header(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> CallHeader:
        """Return the header in the first ``HEADER_BYTES`` bytes of ``data``."""
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


class _CallFields:
    """The fields of a call. The compiled core has the same ones."""

    __slots__ = (
        "code",
        "completion",
        "ended",
        "error",
        "group",
        "instruction",
        "issued",
        "label",
        "nbytes",
        "packed",
        "peer",
        "rest",
        "seconds",
        "started",
        "sync",
        "thread",
        "waiting_for",
    )

    packed: bytes
    sync: bool
    waiting_for: int | None
    completion: Completion | None
    rest: Rest | None
    error: str | None
    group: str
    nbytes: int
    peer: int
    label: str | None
    thread: int
    code: CodeType
    instruction: int
    issued: float
    started: float
    ended: float
    seconds: float


CallFields: type[_CallFields] = _CallFields if core is None else core.CallFields


class Call(CallFields):
    """A call under way on a communicator: its header, its deadline, and the awaited peer.

    ``packed`` is the packed header, the only form that is kept. Links write ``waiting_for`` before
    they block, and another thread reads it to report this rank's state. A call that goes on on a
    device after it returned has a ``completion``. If the caller may wait for the last frames later,
    ``rest`` has them. If ``sync``, the issuing thread waits for the end.
    """

    __slots__ = ("deadline",)

    def __init__(self, header: CallHeader, deadline: Deadline) -> None:
        self.packed = header.pack()
        self.deadline = deadline
        self.sync = True
        self.waiting_for: int | None = None
        self.completion: Completion | None = None
        self.rest: Rest | None = None

    @property
    def header(self) -> CallHeader:
        """The header, unpacked each time: for messages, not for the path of each call."""
        return CallHeader.unpack(self.packed)


class Rest:
    """The end of a call, which its caller waits for when the next call has begun.

    The communicator sets ``wait``, which waits for the call's last frames. ``end_before`` ends the
    call before this one. A call does so when it has posted what it can, before it waits.
    """

    __slots__ = ("_end_before", "wait")

    def __init__(self, end_before: Callable[[], object] | None = None) -> None:
        self._end_before = end_before
        self.wait: Callable[[], None] | None = None

    @property
    def overlaps(self) -> bool:
        """Whether the call before has not ended."""
        return self._end_before is not None

    def end_before(self) -> None:
        """End the call before. Idempotent."""
        end_before, self._end_before = self._end_before, None
        if end_before is not None:
            end_before()


# Codes are part of the wire format: append, never renumber.
_DTYPE_NAMES = (
    "",
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "longdouble",
    "clongdouble",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e8m0fnu",
)
_DTYPE_CODES = {name: code for code, name in enumerate(_DTYPE_NAMES)}


@functools.lru_cache(maxsize=128)
def dtype_code(dtype: np.dtype[np.generic]) -> int:
    """Return the wire code of ``dtype``; raise TypeError for one that collectives do not take."""
    name = dtype.name
    if dtype.kind in "fc" and dtype.itemsize > (16 if dtype.kind == "c" else 8):
        name = "longdouble" if dtype.kind == "f" else "clongdouble"
    code = _DTYPE_CODES.get(name)
    if code is None or not dtype.isnative:
        raise TypeError(
            f"dtype {dtype!r} cannot be communicated; expected one of {', '.join(_DTYPE_NAMES[1:])}"
            " in native byte order"
        )
    return code


def dtype_name(code: int) -> str:
    """Return the name behind a code of ``dtype_code``."""
    return _DTYPE_NAMES[code] if code < len(_DTYPE_NAMES) else f"code {code}"


def op_name(code: int) -> str:
    """Return the name of a reduce op's wire code."""
    return _OP_NAMES[code] if code < len(_OP_NAMES) else f"code {code}"


_OP_NAMES = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
OP_CODES = {name: code for code, name in enumerate(_OP_NAMES) if name}
