"""Buffers as NCCL takes them: parts of a call one behind the other, inputs scaled before.

What these functions put on a stream is in order with NCCL's work there. Memory that they make is
added to ``owners``, who keep it until that work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from transport.cuda.device_state import DeviceStream
from transport.cuda.flat import DeviceFlat
from transport.operands.reduce_op import RedOpType, ReduceOp


def have_one_size(flats: Sequence[DeviceFlat]) -> bool:
    """Whether the buffers, whose sizes all members know, have one size. All members agree."""
    return len({flat.size for flat in flats}) == 1


def are_one_block(flats: Sequence[DeviceFlat]) -> bool:
    """Whether the buffers lie one behind the other here. Another member's may not."""
    return all(one.pointer + one.nbytes == other.pointer for one, other in pairwise(flats))


def new_block(stream: DeviceStream, flats: Sequence[DeviceFlat], owners: list[object]) -> int:
    """Return the address of new memory for all of ``flats``, one behind the other."""
    nbytes = sum(flat.nbytes for flat in flats)
    memory = stream.driver.scratch(nbytes, stream.device, stream.handle)
    owners.append(memory)
    return memory.pointer


def copy(stream: DeviceStream, like: DeviceFlat, into: int, source: int) -> None:
    """Copy as many bytes as ``like`` has."""
    if like.size and into != source:
        stream.driver.copy(into, source, like.nbytes, stream.handle)


def scale(stream: DeviceStream, flat: DeviceFlat, into: int, op: ReduceOp) -> None:
    """Write what ``op`` reduces of ``flat`` to ``into``, if that is not ``flat`` itself."""
    if op.kind is RedOpType.PREMUL_SUM and flat.size:
        stream.driver.scale(into, flat.pointer, flat.dtype, flat.size, op.factor, stream.handle)


def scaled(stream: DeviceStream, flat: DeviceFlat, op: ReduceOp, owners: list[object]) -> int:
    """Return where the input of a reduction is: scaled apart if it must be, since it is kept."""
    if op.kind is not RedOpType.PREMUL_SUM or not flat.size:
        return flat.pointer
    into = new_block(stream, [flat], owners)
    scale(stream, flat, into, op)
    return into
