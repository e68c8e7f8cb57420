"""Rules for what works on each element alone, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshlib.sharding.darray import DArray, ShardingError
from meshlib.sharding.local import as_array
from meshlib.sharding.rules.align import (
    align,
    check_plain,
    is_linear,
    one_mesh,
    settled,
    settled_alike,
    unwrapped,
    wraps,
)
from meshlib.sharding.sharding import Sharding

_SUMS = frozenset({np.add, np.subtract})
_UNARY_LINEAR = frozenset({np.negative, np.positive, np.conjugate})


def call_ufunc(ufunc: np.ufunc, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return ``ufunc(*inputs)``, with ``out`` and what else a ufunc takes in ``kwargs``."""
    out = kwargs.pop("out", None)
    if kwargs.pop("where", True) is not True:
        raise ShardingError(f"{ufunc.__name__}: where= has no rule; use np.where on the results")
    return elementwise(ufunc.__name__, ufunc, inputs, kwargs, partial=_partial_rule(ufunc), out=out)


def elementwise(
    name: str,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    partial: str = "reduced",
    out: Sequence[Any] | None = None,
) -> Any:
    """Return ``function`` of DArrays and single values, element by element.

    ``partial`` says what partial sums allow: ``"sum"``, where all have the same, ``"product"``,
    where one has some, ``"quotient"``, where the first has some; otherwise they are reduced.
    """
    arrays = [x for x in inputs if isinstance(x, DArray)]
    mesh = one_mesh(name, arrays)
    plain = [check_plain(name, x, mesh) for x in inputs if not isinstance(x, DArray)]
    if any(map(wraps, arrays)):
        arrays = unwrapped(arrays, _dtype_of(function, inputs, kwargs or {}))
    left: tuple[tuple[int, str], ...] = ()
    if partial == "sum" and not plain and all(map(is_linear, arrays)):
        arrays, left = settled_alike(arrays)
    elif partial == "product" or (partial == "quotient" and _only_first_is_partial(inputs)):
        arrays, left = settled(arrays)
    else:
        arrays = [x.reduced() for x in arrays]
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    labels = [range(len(shape) - x.ndim, len(shape)) for x in arrays]
    aligned = align(name, arrays, labels)
    sharding = aligned.sharding(range(len(shape)), left)
    parts = iter(aligned.locals)
    locals_ = [next(parts) if isinstance(x, DArray) else x for x in inputs]
    options = dict(kwargs or {})
    if out is not None:
        for one in out:
            if not isinstance(one, DArray) or one.sharding != sharding or one.shape != shape:
                raise ShardingError(
                    f"{name}: the result is {shape} in {sharding}, but out is {one!r}; expected a"
                    " DArray that lies so (without out, the result is a new one)"
                )
        options["out"] = tuple(one.local for one in out)
        function(*locals_, **options)
        return out[0] if len(out) == 1 else tuple(out)
    result = function(*locals_, **options)
    if isinstance(result, tuple):
        return tuple(_made(one, sharding, shape) for one in result)
    return _made(result, sharding, shape)


def _dtype_of(function: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    result = function(
        *(np.empty(0, x.dtype) if isinstance(x, DArray) else x for x in inputs), **kwargs
    )
    return (result[0] if isinstance(result, tuple) else result).dtype


def _made(local: Any, sharding: Sharding, shape: Sequence[int]) -> DArray:
    local = as_array(local)
    return DArray(local, sharding, shape, local.dtype)


def _partial_rule(ufunc: np.ufunc) -> str:
    if ufunc in _SUMS or ufunc in _UNARY_LINEAR:
        return "sum"
    if ufunc is np.multiply:
        return "product"
    return "quotient" if ufunc is np.true_divide else "reduced"


def _only_first_is_partial(inputs: Sequence[Any]) -> bool:
    return not any(isinstance(x, DArray) and x.sharding.partial_dims for x in inputs[1:])
