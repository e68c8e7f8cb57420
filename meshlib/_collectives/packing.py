"""Packing several arrays into one flat buffer; arrays on a device are sent one by one."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

from meshlib._arrays.adapted import AdaptedArray
from transport._calls.call import Call
from transport._communicators.base import Communicator
from transport._cuda.flat import DeviceFlat, end_together
from transport._operands.reduce_op import Flat


def gather_device_arrays(
    communicator: Communicator,
    call: Call,
    ins: Sequence[AdaptedArray],
    outs: Sequence[Sequence[AdaptedArray]],
) -> list[list[Any]]:
    """Gather the arrays one after the other. Their number may differ by member."""
    rank = communicator.rank
    for j in range(max(map(len, outs))):
        targets = [row[j].flat if j < len(row) else row[0].flat[:0] for row in outs]
        own = ins[j].flat if j < len(ins) else ins[0].flat[:0]
        assert targets[rank].size == own.size
        communicator.all_gather(call, targets, own)
    finished = iter(finish(call, [out for row in outs for out in row]))
    return [[next(finished) for _ in row] for row in outs]


def finish(call: Call, outs: Sequence[AdaptedArray]) -> list[Any]:
    """Return the results ``outs`` of a call that ran several collectives on a device."""
    result = [out.finish() for out in outs]
    end_together(call, [cast(DeviceFlat, out.flat) for out in outs])
    return result


def unpack(flat: Flat, into: Sequence[AdaptedArray]) -> list[Any]:
    """Copy ``flat`` into the arrays ``into``; return their results."""
    copy_out(flat, [x.flat for x in into])
    return [x.finish() for x in into]


def copy_out(flat: Flat, into: Sequence[Flat]) -> None:
    """Copy consecutive parts of ``flat`` into the arrays ``into``."""
    start = 0
    for part in into:
        part[...] = flat[start : start + part.size]
        start += part.size


def fingerprint(sizes: Iterable[int]) -> int:
    """Return a checksum of the sizes, from 1 to 2**32 - 1."""
    return zlib.crc32(b"".join(size.to_bytes(8, "little") for size in sizes)) or 1
