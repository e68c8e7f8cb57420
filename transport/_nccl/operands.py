"""NCCL's codes of dtypes and operations, and buffers in the form that NCCL requires.

NCCL requires the parts of a call in one contiguous block, and inputs that are already scaled.

Experimental, not run on a GPU (``docs/run/gpu.md``).

Functions queue their work on the same stream as NCCL's work. They add new memory to ``owners``,
which the caller must hold until that work is done.
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
    RedOpType.PREMUL_SUM: nccl.SUM,  # The inputs are already scaled.
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
# Operations that do not mix the parts treat a complex number as two real numbers.
_PARTS = {"complex64": "float32", "complex128": "float64"}
_BY_PARTS = frozenset({RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM})


@dataclass(frozen=True, slots=True)
class NcclCodes:
    """NCCL's codes of a dtype and an operation; an element counts as ``each`` NCCL elements."""

    dtype: int
    op: int
    each: int

    def count(self, size: int) -> int:
        """Return the number of NCCL elements for ``size`` elements of the dtype."""
        return size * self.each


def codes_for_copy(dtype: np.dtype[Any]) -> NcclCodes:
    """Return the codes for copying elements of ``dtype``, which is always done as bytes."""
    return NcclCodes(nccl.UINT8, nccl.SUM, dtype.itemsize)


def codes_for_reduction(dtype: np.dtype[Any], op: ReduceOp) -> NcclCodes | None:
    """Return the codes for reducing ``dtype`` by ``op``, or None if NCCL cannot do it.

    NCCL supports 8-bit floats only on some GPUs, and lacks 16-bit integers, bitwise operations and
    products of complex numbers. A scale factor for each element is not supported. Scaling a 16-bit
    float beforehand would round it twice.
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
    """Return whether all buffers have the same size. The result is the same on all members."""
    return len({flat.size for flat in flats}) == 1


def are_one_block(flats: Sequence[DeviceFlat]) -> bool:
    """Return whether the buffers form one contiguous block, which may differ between members."""
    return all(one.pointer + one.nbytes == other.pointer for one, other in pairwise(flats))


def new_block(stream: DeviceStream, flats: Sequence[DeviceFlat], owners: list[object]) -> int:
    """Return the address of new memory for all of ``flats``, one after the other."""
    nbytes = sum(flat.nbytes for flat in flats)
    memory = stream.driver.scratch(nbytes, stream.device, stream.handle)
    owners.append(memory)
    return memory.pointer


def copy(stream: DeviceStream, like: DeviceFlat, into: int, source: int) -> None:
    """Copy ``like.nbytes`` bytes from address ``source`` to ``into``."""
    if like.size and into != source:
        stream.driver.copy(into, source, like.nbytes, stream.handle)


def scale(stream: DeviceStream, flat: DeviceFlat, into: int, op: ReduceOp) -> None:
    """Write the scaled ``flat`` to the address ``into`` if ``op`` scales, else do nothing."""
    if op.kind is RedOpType.PREMUL_SUM and flat.size:
        stream.driver.scale(into, flat.pointer, flat.dtype, flat.size, op.factor, stream.handle)


def scaled(stream: DeviceStream, flat: DeviceFlat, op: ReduceOp, owners: list[object]) -> int:
    """Return the address of a reduction's input: a scaled copy if ``op`` scales."""
    if op.kind is not RedOpType.PREMUL_SUM or not flat.size:
        return flat.pointer
    into = new_block(stream, [flat], owners)
    scale(stream, flat, into, op)
    return into
