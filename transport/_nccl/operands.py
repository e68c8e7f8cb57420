"""NCCL's codes of dtypes and operations, and buffers in the form that it takes.

It takes the parts of a call as one contiguous block, and inputs that were scaled before.

Experimental, not run on a GPU (``docs/run/gpu.md``).

Work that these functions put on a stream is ordered with NCCL's work there. New memory is added to
``owners``, which keep it until that work is done.
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
# A complex number is two real ones for operations that do not mix its parts.
_PARTS = {"complex64": "float32", "complex128": "float64"}
_BY_PARTS = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})


@dataclass(frozen=True, slots=True)
class NcclCodes:
    """NCCL's codes of a dtype and an operation, and NCCL's elements in one of ours."""

    dtype: int
    op: int
    each: int

    def count(self, size: int) -> int:
        """Return the number of NCCL's elements in ``size`` of ours."""
        return size * self.each


def codes_for_copy(dtype: np.dtype[Any]) -> NcclCodes:
    """Return how elements of ``dtype`` are moved: as bytes, whatever they are."""
    return NcclCodes(nccl.UINT8, nccl.SUM, dtype.itemsize)


def codes_for_reduction(dtype: np.dtype[Any], op: ReduceOp) -> NcclCodes | None:
    """Return how ``dtype`` is reduced by ``op``, or None when NCCL cannot.

    NCCL lacks 8-bit floats on every GPU, 16-bit integers, bitwise operations and products of
    complex numbers. A scale factor for each element is not supported. Scaling a 16-bit float before
    would round it twice.
    """
    if op.kind is RedOpType.PREMUL_SUM and (
        np.ndim(op.factor) > 0 or reduction_dtype(dtype) != dtype
    ):
        return None
    if dtype.kind == "b":
        code = _BOOL_OPS.get(op.kind)
        return None if code is None else NcclCodes(nccl.UINT8, code, 1)
    code = _OPS.get(op.kind)
    if code is None:
        return None
    part = _PARTS.get(dtype.name)
    if part is not None:
        return NcclCodes(nccl.DTYPES[part], code, 2) if op.kind in _BY_PARTS else None
    known = nccl.DTYPES.get(dtype.name)
    return None if known is None else NcclCodes(known, code, 1)


def have_one_size(flats: Sequence[DeviceFlat]) -> bool:
    """True if the buffers have one size. All members know the sizes, so they agree."""
    return len({flat.size for flat in flats}) == 1


def are_one_block(flats: Sequence[DeviceFlat]) -> bool:
    """True if the buffers are contiguous here. Another member's may not be."""
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
    """Write the scaled ``flat`` to ``into`` if ``op`` scales."""
    if op.kind is RedOpType.PREMUL_SUM and flat.size:
        stream.driver.scale(into, flat.pointer, flat.dtype, flat.size, op.factor, stream.handle)


def scaled(stream: DeviceStream, flat: DeviceFlat, op: ReduceOp, owners: list[object]) -> int:
    """Return the address of a reduction's input: a scaled copy if ``op`` scales."""
    if op.kind is not RedOpType.PREMUL_SUM or not flat.size:
        return flat.pointer
    into = new_block(stream, [flat], owners)
    scale(stream, flat, into, op)
    return into
