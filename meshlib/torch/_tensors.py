"""PyTorch's CPU tensors as NumPy arrays over their memory; its reduce ops as ``ReduceOp``s."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from transport._operands.reduce_op import RedOpType, ReduceOp, premul_sum

torch: Any = import_module("torch")

Array = npt.NDArray[Any]

# NumPy lacks these dtypes: a tensor is viewed as integers, then as ml_dtypes' dtype.
_INTEGERS = {1: torch.uint8, 2: torch.int16}
_FOREIGN = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def _foreign_dtypes() -> dict[Any, tuple[Any, np.dtype[Any]]]:
    if find_spec("ml_dtypes") is None:
        return {}
    library: Any = import_module("ml_dtypes")
    found: dict[Any, tuple[Any, np.dtype[Any]]] = {}
    for name in _FOREIGN:
        if hasattr(torch, name) and hasattr(library, name):
            dtype: Any = getattr(torch, name)
            found[dtype] = _INTEGERS[dtype.itemsize], np.dtype(getattr(library, name))
    return found


_DTYPES = _foreign_dtypes()
_OPS = {
    name: getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def array(tensor: Any) -> Array:
    """Return ``tensor`` as an array over its memory, with its strides.

    Raises TypeError for a sparse tensor and for a dtype that NumPy and ml_dtypes lack. Raises
    ValueError for a lazily conjugated or negated tensor, whose memory has other values.
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        raise TypeError(f"a tensor has layout {tensor.layout}; expected a dense one")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a tensor is conjugated or negated lazily; expected tensor.resolve_conj() or"
            " tensor.resolve_neg()"
        )
    foreign = _DTYPES.get(tensor.dtype)
    try:
        if foreign is None:
            return tensor.numpy()
        return tensor.view(foreign[0]).numpy().view(foreign[1])
    except TypeError as error:
        hint = "" if _DTYPES else "; bfloat16 and float8 need ml_dtypes: pip install ml_dtypes"
        raise TypeError(f"a tensor has dtype {tensor.dtype}: {error}{hint}") from None


def arrays(tensors: Iterable[Any]) -> list[Array]:
    """Return ``array(tensor)`` for each of ``tensors``."""
    return [array(tensor) for tensor in tensors]


def reduction(op: Any) -> ReduceOp:
    """Return the ``ReduceOp`` for torch's ``op``; raise TypeError if there is none."""
    kind: str = getattr(op, "op", op).name
    if kind == RedOpType.PREMUL_SUM.name:
        factor: Any = op.factor
        return premul_sum(array(factor) if isinstance(factor, torch.Tensor) else factor)
    if kind not in _OPS:
        raise TypeError(f"op is {op!r}; expected one of {', '.join(_OPS)} or PREMUL_SUM")
    return _OPS[kind]
