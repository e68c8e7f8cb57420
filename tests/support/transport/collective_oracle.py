"""What collectives must give, written from their definitions with plain NumPy and Python.

Nothing here knows segments, rings or trees. Sums of floats are exact in the reference (the inputs
of the value tests are small integers, so that any order of addition is exact as well), and
rounding happens where the specification says: once, at the end, from float32 for floats of 8 and
16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def exact(array: Array) -> Array:
    """Widen to a dtype in which the tests' values are exact."""
    kind = array.dtype.kind
    if kind in "biu":
        return array
    return array.astype(np.clongdouble if kind == "c" else np.longdouble)


def working_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which a reduction's result is rounded first."""
    return np.dtype(np.float32) if dtype.itemsize <= 2 and dtype.kind in "fV" else dtype


def reduced(inputs: Sequence[Array], op: str, factors: Sequence[float] | None = None) -> Array:
    """The reduction of one input a rank, in their dtype. ``factors``: PREMUL_SUM's, by rank."""
    dtype = inputs[0].dtype
    work = working_dtype(dtype)
    wide = [exact(array) for array in inputs]
    with np.errstate(all="ignore"):
        if op == "PREMUL_SUM":
            assert factors is not None
            wide = [
                exact((array.astype(work) * work.type(factor)).astype(work))
                for array, factor in zip(inputs, factors, strict=True)
            ]
        if op in {"SUM", "AVG", "PREMUL_SUM"}:
            total = fold(np.logical_or if dtype.kind == "b" else np.add, wide)
        elif op == "PRODUCT":
            total = fold(np.logical_and if dtype.kind == "b" else np.multiply, wide)
        elif op in {"MIN", "MAX"}:
            total = wide[0]
            for array in wide[1:]:
                better = array < total if op == "MIN" else array > total
                total = np.where(better | (array != array), array, total)  # NaN stays
                total = np.where(wide[0] != wide[0], wide[0], total)
        else:
            bits = {"BAND": lambda a, b: a & b, "BOR": lambda a, b: a | b}
            total = fold(bits.get(op, lambda a, b: a ^ b), wide)
        total = np.asarray(total).astype(work)
        if op == "AVG":
            parts = [total.real, total.imag] if dtype.kind == "c" else [total]
            parts = [part / part.dtype.type(len(inputs)) for part in parts]
            total = parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]
        return total.astype(dtype)
