"""The encoding of a command's fields, on the wire and in a file: each has a length and bytes.

All numbers are little-endian. A length does not include itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

LENGTH = struct.Struct("<I")
LENGTH_BYTES = LENGTH.size
_NUMBER = struct.Struct("<q")


class WireError(ValueError):
    """Bytes that are not a frame, fields or a number."""


def pack_fields(fields: Sequence[bytes]) -> bytes:
    """Return ``fields`` encoded."""
    if len(fields) == 1:
        return LENGTH.pack(len(fields[0])) + fields[0]
    pieces: list[bytes] = []
    for field in fields:
        pieces.append(LENGTH.pack(len(field)))
        pieces.append(field)
    return b"".join(pieces)


def unpack_fields(data: bytes | bytearray, begin: int, end: int) -> list[bytes]:
    """Return the fields in ``data[begin:end]``; raise WireError if it is malformed."""
    fields: list[bytes] = []
    while begin < end:
        body = begin + LENGTH_BYTES
        if body > end:
            raise WireError("a field's length is truncated")
        begin = body + LENGTH.unpack_from(data, begin)[0]
        if begin > end:
            raise WireError("a field is longer than its frame")
        fields.append(bytes(data[body:begin]))
    return fields


def pack_number(number: int) -> bytes:
    """Return the field of a number below 2**63."""
    return _NUMBER.pack(number)


def unpack_number(field: bytes) -> int:
    """Return the number in a field; raise WireError for a wrong length."""
    if len(field) != _NUMBER.size:
        raise WireError(f"a number of {len(field)} bytes")
    return _NUMBER.unpack(field)[0]
