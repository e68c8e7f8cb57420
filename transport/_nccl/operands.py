"""What NCCL is given: its codes for a dtype and an operation, of which it knows some, and buffers
as it takes them, with parts of a call one behind the other and inputs scaled before.

Experimental, not run on a GPU (``docs/gpu.md``).

What these functions put on a stream is in order with NCCL's work there. Memory that they make is
added to ``owners``, who keep it until that work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from transport._cuda.device_state import DeviceStream
from transport._cuda.flat import DeviceFlat
from transport._nccl import library as nccl
from transport._operands.reduce_op import RedOpType, ReduceOp, reduction_dtype

_OPS = {
    RedOpType.SUM: nccl.SUM,
    RedOpType.AVG: nccl.AVG,
    RedOpType.PREMUL_SUM: nccl.SUM,  # of inputs that were scaled before
    RedOpType.PRODUCT: nccl.PROD,
    RedOpType.MIN: nccl.MIN,
    RedOpType.MAX: nccl.MAX,
}
# A bool is a byte of 0 or 1.
_BOOL_OPS = {
    RedOpType.SUM: nccl.MAX,
    RedOpType.PRODUCT: nccl.MIN,
    RedOpType.MIN: nccl.MIN,
    RedOpType.MAX: nccl.MAX,
    RedOpType.BAND: nccl.MIN,
    RedOpType.BOR: nccl.MAX,
}
# A complex number is two real ones where its parts do not meet.
_PARTS = {"complex64": "float32", "complex128": "float64"}
_BY_PARTS = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})


@dataclass(frozen=True, slots=True)
class Plan:
    """NCCL's codes of a dtype and an operation, and its elements for one of ours."""

    dtype: int
    op: int
    each: int

    def count(self, size: int) -> int:
        """Return the number of NCCL's elements in ``size`` of ours."""
        return size * self.each


def plan_copy(dtype: np.dtype[Any]) -> Plan:
    """Return how elements of ``dtype`` are moved: as bytes, whatever they are."""
    return Plan(nccl.UINT8, nccl.SUM, dtype.itemsize)


def plan_reduction(dtype: np.dtype[Any], op: ReduceOp) -> Plan | None:
    """Return how ``dtype`` is reduced by ``op``, or None when NCCL cannot.

    It has no 8-bit floats that every GPU reduces, no 16-bit integers, no bitwise operations, no
    product of complex numbers, and a factor for each element is more than it takes. Scaled
    before, a float of 16 bits would be rounded once too often.
    """
    if op.kind is RedOpType.PREMUL_SUM and (
        np.ndim(op.factor) > 0 or reduction_dtype(dtype) != dtype
    ):
        return None
    if dtype.kind == "b":
        code = _BOOL_OPS.get(op.kind)
        return None if code is None else Plan(nccl.UINT8, code, 1)
    code = _OPS.get(op.kind)
    if code is None:
        return None
    part = _PARTS.get(dtype.name)
    if part is not None:
        return Plan(nccl.DTYPES[part], code, 2) if op.kind in _BY_PARTS else None
    known = nccl.DTYPES.get(dtype.name)
    return None if known is None else Plan(known, code, 1)


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
