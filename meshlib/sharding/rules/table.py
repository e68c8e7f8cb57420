"""The table of rules: which of NumPy's functions work on DArrays, and by what.

A rule takes the function's own arguments, as NumPy names them. What is not here raises
``ShardingError``, which says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from meshlib.sharding.darray import DArray, ShardingError
from meshlib.sharding.rules import contractions, reductions, shapes
from meshlib.sharding.rules.elementwise import call_ufunc, elementwise


def _each(function: Callable[..., Any], *, linear: bool = False) -> Callable[..., Any]:
    """Return the rule of a function of each element: arrays first, options by name."""

    def rule(*inputs: Any, **options: Any) -> Any:
        way = "sum" if linear else "reduced"
        return elementwise(function.__name__, function, inputs, options, partial=way)

    return rule


def _clip(a: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Any:
    out = options.pop("out", None)
    out = None if out is None else (out,)
    return elementwise("clip", np.clip, (a, a_min, a_max), options, out=out)


def _round(a: Any, decimals: int = 0) -> Any:
    return elementwise("round", partial(np.round, decimals=decimals), (a,))


def _all_equal(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and bool(reductions.reduce(reductions.ALL, a == b))


def _all_close(a: Any, b: Any, **options: Any) -> bool:
    close = elementwise("allclose", np.isclose, (a, b), options)
    return bool(reductions.reduce(reductions.ALL, close))


def _filled(value: Any) -> Callable[..., DArray]:
    def rule(a: DArray, dtype: Any = None) -> DArray:
        from meshlib.sharding.creation import full

        return full(a.shape, a.sharding.reduced(), value, dtype or a.dtype)

    return rule


def _full_like(a: DArray, fill_value: Any, dtype: Any = None) -> DArray:
    return _filled(fill_value)(a, dtype)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    # reductions
    np.sum: partial(reductions.reduce, reductions.SUM),
    np.prod: partial(reductions.reduce, reductions.PROD),
    np.max: partial(reductions.reduce, reductions.MAX),
    np.min: partial(reductions.reduce, reductions.MIN),
    np.amax: partial(reductions.reduce, reductions.MAX),
    np.amin: partial(reductions.reduce, reductions.MIN),
    np.any: partial(reductions.reduce, reductions.ANY),
    np.all: partial(reductions.reduce, reductions.ALL),
    np.mean: reductions.mean,
    np.var: reductions.var,
    np.std: reductions.std,
    np.linalg.norm: reductions.norm,
    np.array_equal: _all_equal,
    np.allclose: _all_close,
    # products
    np.dot: contractions.dot,
    np.vdot: contractions.vdot,
    np.einsum: contractions.einsum,
    np.tensordot: contractions.tensordot,
    # element by element (ufuncs: all that have no signature)
    np.where: _each(np.where),
    np.clip: _clip,
    np.round: _round,
    np.isclose: _each(np.isclose),
    np.nan_to_num: _each(np.nan_to_num),
    np.real: _each(np.real, linear=True),
    np.imag: _each(np.imag, linear=True),
    np.copy: DArray.copy,
    # shapes
    np.transpose: shapes.transpose,
    np.swapaxes: shapes.swapaxes,
    np.moveaxis: shapes.moveaxis,
    np.expand_dims: shapes.expand_dims,
    np.squeeze: shapes.squeeze,
    np.reshape: shapes.reshape,
    np.ravel: shapes.ravel,
    np.concatenate: shapes.concatenate,
    np.stack: shapes.stack,
    np.shape: attrgetter("shape"),
    np.ndim: attrgetter("ndim"),
    np.size: attrgetter("size"),
    # like another
    np.zeros_like: _filled(0),
    np.ones_like: _filled(1),
    np.empty_like: _filled(0),
    np.full_like: _full_like,
}


def apply_ufunc(
    ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do what NumPy asks a DArray to do for a ufunc or one of its methods."""
    name = ufunc.__name__
    if method == "__call__":
        if ufunc is np.matmul and not kwargs:
            return contractions.matmul(*inputs)
        if ufunc.signature is None:
            return call_ufunc(ufunc, inputs, kwargs)
    elif method == "reduce" and ufunc in reductions.OF_UFUNCS:
        # ``reduce`` of a ufunc is over dim 0 unless told; np.sum and the others are over all.
        options = {"axis": 0, **kwargs}
        return reductions.reduce(reductions.OF_UFUNCS[ufunc], *inputs, **options)
    shown = name if method == "__call__" else f"{name}.{method}"
    raise ShardingError(
        f"np.{shown} with {', '.join(kwargs) or 'these arguments'} has no rule for DArrays;"
        " use full_array(), or to_local() and DArray.from_local where each part stands for itself"
    )


def apply_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what NumPy asks a DArray to do for a function."""
    rule = FUNCTIONS.get(func)
    name = f"{func.__module__}.{func.__qualname__}"
    if rule is None:
        raise ShardingError(
            f"{name} has no rule for DArrays; use full_array(), or to_local() and DArray.from_local"
            " where each part stands for itself"
        )
    try:
        return rule(*args, **kwargs)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ShardingError(f"{name}: {error}: that argument has no rule for DArrays") from None
