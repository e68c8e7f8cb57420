"""Rules for reductions: each rank reduces its part, and what was split is partial afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np

from meshlib.sharding.darray import DArray, ShardingError
from meshlib.sharding.local import array_module, dim_of
from meshlib.sharding.rules.align import wraps
from meshlib.sharding.sharding import LINEAR, Sharding

Axis = int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction by NumPy's function, and the op with which its partial values are reduced."""

    function: Callable[..., Any]
    op: str


SUM = Reduction(np.sum, "sum")
PROD = Reduction(np.prod, "product")
MAX = Reduction(np.max, "max")
MIN = Reduction(np.min, "min")
ANY = Reduction(np.any, "max")
ALL = Reduction(np.all, "min")

OF_UFUNCS: dict[np.ufunc, Reduction] = {
    np.add: SUM,
    np.multiply: PROD,
    np.maximum: MAX,
    np.minimum: MIN,
    np.logical_or: ANY,
    np.logical_and: ALL,
}


def reduce(
    rule: Reduction, x: DArray, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False
) -> DArray:
    """Return ``x`` reduced over ``axis``, partial along the mesh dims that split it."""
    axes = _axes(x, axis)
    ops = {op for _, op in x.sharding.partial_dims}
    if not ops <= (LINEAR if rule.op == "sum" else {rule.op}) or rule.function in (np.any, np.all):
        x = x.reduced()
    if rule in (MAX, MIN) and any(x.shape[d] == 0 for d in axes):
        raise ValueError(f"{rule.function.__name__} of nothing: {x!r} over axis {axis}")
    if rule in (MAX, MIN) and x.dtype.kind == "c" and any(x.sharding.split_of(d) for d in axes):
        raise ShardingError(
            f"{rule.function.__name__} of {x!r} over axis {axis}, which is split: complex numbers"
            " have no order to reduce by; use full_array()"
        )
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    local, module = x.local, array_module(x.local)
    if rule in (MAX, MIN) and any(local.shape[d] == 0 for d in axes):
        # This rank has nothing to compare, so what it has must not count.
        options["initial"] = _bounds(local.dtype)[0 if rule is MAX else 1]
    result = module.asarray(rule.function(local, axis=axes, keepdims=keepdims, **options))
    if wraps(x) and result.dtype != x.dtype:
        return reduce(rule, x.reduced(), axis, dtype=dtype, keepdims=keepdims)
    new = [(i, rule.op) for d in axes for i in x.sharding.split_of(d)]
    dims: list[tuple[int, ...]] = []
    shape: list[int] = []
    for d in range(x.ndim):
        if d not in axes:
            dims.append(x.sharding.split_of(d))
            shape.append(x.shape[d])
        elif keepdims:
            dims.append(())
            shape.append(1)
    sharding = Sharding.of_positions(x.mesh, dims, (*x.sharding.partial_dims, *new))
    return DArray(result, sharding, shape, result.dtype)


def mean(x: DArray, axis: Axis = None, *, dtype: Any = None, keepdims: bool = False) -> DArray:
    """Return the mean over ``axis``: the sum, divided by how many there are."""
    count = prod(x.shape[d] for d in _axes(x, axis))
    if dtype is None and x.dtype == np.float16:
        # As NumPy: the sum may be more than float16 holds.
        wide = np.true_divide(reduce(SUM, x, axis, dtype="f4", keepdims=keepdims), count)
        return cast(DArray, wide).reduced().astype(x.dtype)
    return cast(DArray, np.true_divide(reduce(SUM, x, axis, dtype=dtype, keepdims=keepdims), count))


def var(
    x: DArray, axis: Axis = None, *, dtype: Any = None, ddof: float = 0, keepdims: bool = False
) -> DArray:
    """Return the variance over ``axis``, by way of the mean."""
    x = x.reduced()
    apart = x - mean(x, axis, dtype=dtype, keepdims=True)
    count = prod(x.shape[d] for d in _axes(x, axis))
    total = reduce(SUM, _squares(apart), axis, dtype=dtype, keepdims=keepdims)
    return cast(DArray, np.true_divide(total, max(count - ddof, 0)))


def std(
    x: DArray, axis: Axis = None, *, dtype: Any = None, ddof: float = 0, keepdims: bool = False
) -> DArray:
    """Return the standard deviation over ``axis``."""
    return cast(DArray, np.sqrt(var(x, axis, dtype=dtype, ddof=ddof, keepdims=keepdims)))


def norm(x: DArray, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> DArray:
    """Return the root of the sum of squares, or, with ``ord=np.inf``, the greatest magnitude."""
    vectors = axis is None or np.ndim(axis) == 0
    if x.dtype.kind in "biu":
        x = x.astype(float)  # whose squares do not overflow
    if ord is None or (ord == 2 and vectors and (axis is not None or x.ndim == 1)):
        return cast(DArray, np.sqrt(reduce(SUM, _squares(x), axis, keepdims=keepdims)))
    if ord == np.inf and vectors and (axis is not None or x.ndim == 1):
        return reduce(MAX, cast(DArray, np.abs(x)), axis, keepdims=keepdims)
    raise ShardingError(f"linalg.norm: ord={ord!r} of {x!r} has no rule; use full_array()")


def _axes(x: DArray, axis: Axis) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.ndim))
    found = tuple(dim_of(one, x.ndim) for one in (axis if isinstance(axis, tuple) else (axis,)))
    if len(set(found)) < len(found):
        raise ValueError(f"axis {axis} has a dim twice")
    return found


def _squares(x: DArray) -> DArray:
    """Return the squared magnitudes."""
    return cast(DArray, np.square(np.abs(x)))


def _bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest value of ``dtype``."""
    if dtype.kind == "b":
        return False, True
    return (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-np.inf, np.inf)
