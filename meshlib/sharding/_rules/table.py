"""The table of rules: the NumPy functions that work on DArrays, and the rule of each.

A rule's parameters are the arguments that it accepts, under NumPy's names. Other arguments raise
``ShardingError`` unless they have NumPy's default. So do functions that are not in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import Parameter, Signature, signature
from typing import Any

import numpy as np

from meshlib.sharding._global_array import GlobalArray, ShardingError
from meshlib.sharding._local import module_for, shape_of
from meshlib.sharding._rules import contractions, reductions, shapes
from meshlib.sharding._rules.elementwise import call_ufunc, elementwise

_INSTEAD = (
    "has no rule for DArrays; use full_array(), or to_local() and DArray.from_local if parts are"
    " independent"
)


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of an elementwise function, whose arguments may all be arrays."""

    def rule(out: Any = None, **arguments: Any) -> Any:
        def call(*values: Any, **options: Any) -> Any:
            return function(**dict(zip(arguments, values, strict=True)), **options)

        outs = None if out is None else (out,)
        return elementwise(function.__name__, call, [*arguments.values()], out=outs)

    return rule


def _where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None or y is None:
        raise ShardingError(
            "where: without x and y it has no rule, because its length depends on values; use"
            " full_array()"
        )
    return elementwise("where", np.where, (condition, x, y))


def _all_equal(a1: Any, a2: Any) -> bool:
    return np.shape(a1) == np.shape(a2) and bool(np.all(a1 == a2))


def _all_close(**arguments: Any) -> bool:
    return bool(np.all(np.isclose(**arguments)))


def _full_like(a: GlobalArray, fill_value: Any, dtype: Any = None) -> GlobalArray:
    whole, local = a.sharding.reduced(), None
    if a.to_local() is not None:
        box = whole.slices(a.shape)
        value = np.broadcast_to(fill_value, a.shape)[box] if np.ndim(fill_value) else fill_value
        local = module_for(a.mesh.device_type).full(shape_of(box), value, dtype or a.dtype)
    return type(a)(local, whole, a.shape, dtype or a.dtype)


def _empty_like(prototype: GlobalArray, dtype: Any = None) -> GlobalArray:
    return _full_like(prototype, 0, dtype)


def _attribute(name: str) -> Callable[[GlobalArray], Any]:
    def rule(a: GlobalArray) -> Any:
        return getattr(a, name)

    return rule


def _reshape(
    a: GlobalArray, shape: Any = None, order: str = "C", newshape: Any = None
) -> GlobalArray:
    # NumPy before 2.1 names the shape ``newshape``.
    return shapes.reshape(a, newshape if shape is None else shape, order)


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
    np.where: _where,
    np.clip: _each(np.clip),
    np.round: _each(np.round),
    np.isclose: _each(np.isclose),
    np.nan_to_num: _each(np.nan_to_num),
    np.real: _each(np.real),
    np.imag: _each(np.imag),
    np.copy: _each(np.copy),
    # shapes
    np.transpose: shapes.moved(np.transpose),
    np.swapaxes: shapes.moved(np.swapaxes),
    np.moveaxis: shapes.moved(np.moveaxis),
    np.expand_dims: shapes.moved(np.expand_dims),
    np.squeeze: shapes.squeeze,
    np.reshape: _reshape,
    np.ravel: shapes.ravel,
    np.concatenate: shapes.concatenate,
    np.stack: shapes.stack,
    np.shape: _attribute("shape"),
    np.ndim: _attribute("ndim"),
    np.size: _attribute("size"),
    # arrays like another
    np.zeros_like: partial(_full_like, fill_value=0),
    np.ones_like: partial(_full_like, fill_value=1),
    np.empty_like: _empty_like,
    np.full_like: _full_like,
}


def apply_ufunc(
    ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Implement ``__array_ufunc__`` of GlobalArray."""
    name = ufunc.__name__
    if method == "__call__":
        if ufunc is np.matmul and not kwargs:
            return contractions.matmul(*inputs)
        if ufunc.signature is None:
            return call_ufunc(ufunc, inputs, kwargs)
    elif method == "reduce" and ufunc in reductions.OF_UFUNCS:
        # A ufunc's ``reduce`` is over dim 0 by default, np.sum over all dims.
        rule = partial(reductions.reduce, reductions.OF_UFUNCS[ufunc])
        return _ruled(f"np.{name}.reduce", rule, {"a": inputs[0], "axis": 0, **kwargs})
    shown = name if method == "__call__" else f"{name}.{method}"
    raise ShardingError(f"np.{shown} with {', '.join(kwargs) or 'these arguments'} {_INSTEAD}")


def apply_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``__array_function__`` of GlobalArray."""
    rule = FUNCTIONS.get(func)
    name = f"{func.__module__}.{func.__qualname__}"
    if rule is None:
        raise ShardingError(f"{name} {_INSTEAD}")
    parameters = _parameters(func, rule)
    try:
        given = parameters.bind(*args, **kwargs).arguments
    except TypeError as error:  # of the rule's signature
        raise ShardingError(f"{name}: {error}; it {_INSTEAD}") from None
    for parameter in parameters.parameters.values():
        if parameter.kind is Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
        elif given.get(parameter.name) is parameter.default:
            given.pop(parameter.name, None)
    return _ruled(name, rule, given)


def _ruled(name: str, rule: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Return ``rule(**given)``; raise ShardingError for an argument that it does not accept."""
    taken = _parameters(rule, rule).parameters
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values()):
        for argument in given.keys() - taken.keys():
            raise ShardingError(f"{name}: {argument}= {_INSTEAD}")
    return rule(**given)


@cache
def _parameters(function: Callable[..., Any], rule: Callable[..., Any]) -> Signature:
    """Return the signature of NumPy's ``function``, or its ``rule``'s if NumPy has none."""
    try:
        return signature(function)
    except ValueError:
        return signature(rule)
