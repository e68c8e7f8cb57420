"""Rules for reductions: each rank reduces its part; reduced split dims leave partial values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import numpy as np

from meshlib.sharding._global_array import GlobalArray, ShardingError
from meshlib.sharding._local import array_module
from meshlib.sharding._rules.align import stays_partial, summed_as
from meshlib.sharding._rules.contractions import vdot
from meshlib.sharding._sharding import Sharding

Axis = int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ReductionRule:
    """A reduction by NumPy's function, and the op that reduces its partial values."""

    function: Callable[..., Any]
    op: str


SUM = ReductionRule(np.sum, "sum")
PROD = ReductionRule(np.prod, "product")
MAX = ReductionRule(np.max, "max")
MIN = ReductionRule(np.min, "min")
ANY = ReductionRule(np.any, "max")
ALL = ReductionRule(np.all, "min")

OF_UFUNCS: dict[np.ufunc, ReductionRule] = {
    np.add: SUM,
    np.multiply: PROD,
    np.maximum: MAX,
    np.minimum: MIN,
    np.logical_or: ANY,
    np.logical_and: ALL,
}


def reduce(
    rule: ReductionRule,
    a: GlobalArray,
    axis: Axis = None,
    dtype: Any = None,
    keepdims: bool = False,
    initial: Any = None,
) -> GlobalArray:
    """Return ``a`` reduced over ``axis``, partial along the mesh dims that split it.

    ``dtype`` is for sums and products, ``initial`` for max and min.
    """
    options = {} if dtype is None else {"dtype": dtype}
    options |= {} if initial is None else {"initial": initial}
    for name in options:
        if rule not in {"dtype": (SUM, PROD), "initial": (MAX, MIN)}[name]:
            raise ShardingError(f"{rule.function.__name__}: {name}= has no rule for DArrays")
    # NumPy checks the axis and finds the dtype, on an array of at most one element.
    one = np.ones([min(length, 1) for length in a.shape], a.dtype)
    wanted = rule.function(one, axis=axis, **options).dtype
    axes = _axes(a, axis)
    split = [i for d in axes for i in a.sharding.split_of(d)]
    if wanted.kind == "c" and rule in (MAX, MIN) and split:
        raise ShardingError(
            f"{rule.function.__name__} of {a!r} over axis {axis}, which is split: complex numbers"
            " have no order for a reduction; use full_array()"
        )
    op, wide = summed_as(rule.op, wanted, bool(split))
    if not stays_partial(a, op, wanted):
        a = a.reduced()
    local, module = a.local, array_module(a.local)
    if wide != wanted:
        local, options = local.astype(wanted, copy=False), {"dtype": wide}
    if rule in (MAX, MIN) and initial is None and any(local.shape[d] == 0 for d in axes):
        # This rank has no elements to compare, so its value must be neutral.
        options["initial"] = _bounds(local.dtype)[0 if rule is MAX else 1]
    result = module.asarray(rule.function(local, axis=axes, keepdims=keepdims, **options))
    kept = [d for d in range(a.ndim) if keepdims or d not in axes]
    dims = [() if d in axes else a.sharding.split_of(d) for d in kept]
    shape = [1 if d in axes else a.shape[d] for d in kept]
    partial = (*a.sharding.partial_dims, *((i, op) for i in split))
    sharding = Sharding.of_positions(a.mesh, dims, partial)
    return type(a)(result, sharding, shape, result.dtype).astype(wanted, copy=False)


def mean(
    a: GlobalArray, axis: Axis = None, dtype: Any = None, keepdims: bool = False
) -> GlobalArray:
    """Return the mean over ``axis``: the sum divided by the number of elements."""
    np.mean(np.ones((1,) * a.ndim), axis)  # checks the axis
    made = wide = a.dtype if dtype is None else np.dtype(dtype)
    if dtype is None and a.dtype.kind in "biu":
        made = wide = np.dtype(np.float64)
    elif dtype is None and a.dtype == np.float16:
        wide = np.dtype(np.float32)
    total = reduce(SUM, a, axis, wide, keepdims)
    return cast(GlobalArray, np.true_divide(total, _count(a, axis))).astype(made, copy=False)


def var(
    a: GlobalArray, axis: Axis = None, dtype: Any = None, ddof: float = 0, keepdims: bool = False
) -> GlobalArray:
    """Return the variance over ``axis``, via the mean."""
    if dtype is not None and np.dtype(dtype).kind in "biu":
        raise ShardingError(f"var: dtype={np.dtype(dtype)} has no rule; expected a float dtype")
    if dtype is None and a.dtype.kind in "biu":
        dtype = np.float64
    a = a.reduced()
    apart = cast(GlobalArray, a - mean(a, axis, dtype, keepdims=True))
    total = _squares(apart, lambda x: reduce(SUM, np.square(x), axis, dtype, keepdims))
    return cast(GlobalArray, np.true_divide(total, max(_count(a, axis) - ddof, 0)))


def std(
    a: GlobalArray, axis: Axis = None, dtype: Any = None, ddof: float = 0, keepdims: bool = False
) -> GlobalArray:
    """Return the standard deviation over ``axis``."""
    return cast(GlobalArray, np.sqrt(var(a, axis, dtype, ddof, keepdims)))


def norm(x: GlobalArray, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> GlobalArray:
    """Return the root of the sum of squares, or with ``ord=np.inf`` the greatest magnitude."""
    np.linalg.norm(np.ones((1,) * x.ndim), ord, axis)  # checks ord and axis
    vectors = x.ndim == 1 if axis is None else not isinstance(axis, tuple)
    if x.dtype.kind in "biu":
        x = x.astype(float)  # squares of integers could overflow
    if ord == np.inf and vectors:
        return reduce(MAX, cast(GlobalArray, np.abs(x)), axis, keepdims=keepdims, initial=0)
    if not (ord is None or (ord == 2 and vectors)):
        raise ShardingError(f"linalg.norm: ord={ord!r} of {x!r} has no rule; use full_array()")
    if axis is not None:
        return cast(
            GlobalArray,
            np.sqrt(_squares(x, lambda x: reduce(SUM, np.square(x), axis, None, keepdims))),
        )
    whole = cast(GlobalArray, np.sqrt(_squares(x, lambda x: vdot(x, x))))
    return whole.reshape((1,) * x.ndim) if keepdims else whole


def _axes(a: GlobalArray, axis: Axis) -> tuple[int, ...]:
    """Return the dims of ``axis``, found as the dims that NumPy reduces to length 1."""
    left = np.any(np.empty((0,) * a.ndim, bool), axis=axis, keepdims=True).shape
    return tuple(d for d, length in enumerate(left) if length)


def _count(a: GlobalArray, axis: Axis) -> int:
    return prod(a.shape[d] for d in _axes(a, axis))


def _squares(x: GlobalArray, total: Callable[[Any], GlobalArray]) -> GlobalArray:
    """Return the sum of squared magnitudes; ``total`` computes it for real arrays."""
    return total(np.real(x)) + total(np.imag(x)) if x.dtype.kind == "c" else total(x)


def _bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the greatest value of ``dtype``."""
    if dtype.kind == "b":
        return False, True
    return (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-np.inf, np.inf)
