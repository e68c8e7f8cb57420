"""How a dtype and an operation are put to NCCL, which knows some of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from transport.nccl import library as nccl
from transport.operands.reduce_op import RedOpType, ReduceOp, reduction_dtype

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
