"""The codes of dtypes and reduce ops in a call's header."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

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
    """Return the wire code of ``dtype``; raise TypeError if collectives do not support it."""
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
    """Return the name of the dtype with the wire code ``code``."""
    return _DTYPE_NAMES[code] if code < len(_DTYPE_NAMES) else f"code {code}"


def op_name(code: int) -> str:
    """Return the name of the reduce op with the wire code ``code``."""
    return _OP_NAMES[code] if code < len(_OP_NAMES) else f"code {code}"


_OP_NAMES = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
OP_CODES = {name: code for code, name in enumerate(_OP_NAMES) if name}
