"""Participation in a user's collective without contributing to its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from meshlib import ProcessGroup, ReduceOp, premul_sum
from meshlib.extend import (
    Call,
    CallHeader,
    CallSpec,
    Communicator,
    Kind,
    Members,
    Run,
    dtype_name,
    issue,
    op_name,
)
from parallel._arrays import is_floating

_Dtype = np.dtype[Any]

_SHADOWED = (Kind.ALL_REDUCE, Kind.REDUCE, Kind.BROADCAST, Kind.BARRIER)


def check_shadowable(
    header: CallHeader, device: str, active: Sequence[int], group: Members | ProcessGroup
) -> None:
    """Raise RuntimeError for a call in which a rank without inputs cannot participate."""
    what = f"{Kind(header.kind).name.lower()} on {group} inside Join"
    if header.kind not in _SHADOWED:
        raise RuntimeError(
            f"{what}: a rank that is out of inputs has no data for this call. Use all_reduce, "
            "reduce, broadcast or barrier, or make the call outside of Join"
        )
    if device != "cpu":
        raise RuntimeError(
            f"{what}: a rank that is out of inputs can participate only in calls on the CPU; this "
            f"call is on {device!r}"
        )
    if header.kind == Kind.BROADCAST and header.root not in active:
        raise RuntimeError(
            f"{what}: its source, group rank {header.root}, is out of inputs; expected one of "
            f"{list(active)}"
        )


def shadow_call(header: CallHeader, group: ProcessGroup) -> None:
    """Participate in the call that ``header`` describes, with neutral values."""
    kind = Kind(header.kind)
    count = header.elements
    dtype = np.dtype(dtype_name(header.dtype)) if header.dtype else np.dtype(np.uint8)

    def run(communicator: Communicator, call: Call) -> None:
        if kind is Kind.BARRIER:
            communicator.barrier(call)
        elif kind is Kind.BROADCAST:
            communicator.broadcast(call, np.empty(count, dtype), header.root)
        else:
            op = _op(header.op)
            flat = np.full(count, neutral(op, dtype), dtype)
            if kind is Kind.ALL_REDUCE:
                communicator.all_reduce(call, flat, op)
            else:
                communicator.reduce(call, flat, op, header.root)

    nbytes = count * dtype.itemsize
    issue(
        group,
        CallSpec(kind, run, count, header.root, header.dtype, header.op, header.extra, nbytes),
    )


class _AmongActive:
    """The communicator ``inner``, but with averages multiplied by ``scale``."""

    def __init__(self, inner: Communicator, scale: float) -> None:
        self._inner = inner
        self._scale = scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, call: Call, buffer: Any, op: ReduceOp) -> None:
        self._inner.all_reduce(call, buffer, op)
        np.multiply(buffer, self._scale, out=buffer, casting="same_kind")

    def reduce(self, call: Call, buffer: Any, op: ReduceOp, root: int) -> None:
        self._inner.reduce(call, buffer, op, root)
        if self._inner.rank == root:
            np.multiply(buffer, self._scale, out=buffer, casting="same_kind")


def among_active(run: Run, header: CallHeader, scale: float) -> Run:
    """Return ``run``; if it averages, modified to average over the ranks with inputs.

    Ranks without inputs contribute zeros, so the average over all ranks is multiplied by ``scale``:
    the number of ranks divided by the number of ranks with inputs.
    """
    if scale == 1 or op_name(header.op) != "AVG":
        return run

    def scaled(communicator: Communicator, call: Call) -> Any:
        return run(cast(Communicator, _AmongActive(communicator, scale)), call)

    return scaled


def _op(code: int) -> ReduceOp:
    name = op_name(code)
    # The factor does not matter, because it multiplies this rank's zeros.
    return premul_sum(1) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def neutral(op: ReduceOp, dtype: _Dtype) -> Any:
    """Return the neutral element of ``op``."""
    name = op.kind.name
    if name == "PRODUCT":
        return 1
    if name == "BAND":
        return True if dtype.kind == "b" else ~dtype.type(0)
    if name in ("MIN", "MAX"):
        low, high = _limits(dtype)
        return high if name == "MIN" else low
    return 0


def _limits(dtype: _Dtype) -> tuple[Any, Any]:
    if dtype.kind == "b":
        return False, True
    if not is_floating(dtype):
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.kind == "f":
        return -np.inf, np.inf
    import ml_dtypes  # which defines all remaining dtypes

    info = ml_dtypes.finfo(dtype)
    infinity = np.array(np.inf).astype(dtype)
    has_infinity = bool(np.isinf(infinity.astype(np.float64)))
    return (-np.inf, np.inf) if has_infinity else (info.min, info.max)
