"""Rules for elementwise functions, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshlib.sharding._global_array import GlobalArray, ShardingError
from meshlib.sharding._local import array_module, as_array
from meshlib.sharding._rules.align import align, check_plain, match_partial, one_mesh, stays_partial

_SUMS = frozenset({np.add, np.positive})
_INTEGER_SUMS = _SUMS | {np.subtract, np.negative}


def call_ufunc(ufunc: np.ufunc, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return ``ufunc(*inputs)``; ``kwargs`` has ``out`` and the ufunc's other keywords."""
    out = kwargs.pop("out", None)
    if kwargs.pop("where", True) is not True:
        raise ShardingError(f"{ufunc.__name__}: where= has no rule; use np.where on the results")
    return elementwise(ufunc.__name__, ufunc, inputs, kwargs, out)


def elementwise(
    name: str,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    out: Sequence[Any] | None = None,
) -> Any:
    """Return ``function`` of DArrays and single values, element by element."""
    options = dict(kwargs or {})
    arrays = [x for x in inputs if isinstance(x, GlobalArray)]
    mesh = one_mesh(name, arrays)
    for x in inputs:
        if not isinstance(x, GlobalArray):
            check_plain(name, x, mesh)
    # All ranks must raise if NumPy refuses one element, also ranks without elements.
    ones = (_sample(x) if isinstance(x, GlobalArray) else x for x in inputs)
    with np.errstate(all="ignore"):
        made = function(*ones, **options)
    signed = isinstance(inputs[-1], GlobalArray) and inputs[-1].dtype.kind == "i"
    if function is np.power and signed and made.dtype.kind == "i":
        raise ShardingError(
            "power: integers with signed exponents have no rule, because only ranks with a"
            " negative exponent would raise; use astype on an operand"
        )
    arrays, left = match_partial(arrays, _of_parts(function, inputs, made, out))
    shape = np.broadcast_shapes(*(x.shape for x in arrays))
    labels = [range(len(shape) - x.ndim, len(shape)) for x in arrays]
    aligned = align(name, arrays, labels)
    sharding = aligned.sharding(range(len(shape)), left)
    parts = iter(aligned.locals)
    locals_ = [next(parts) if isinstance(x, GlobalArray) else x for x in inputs]
    if out is not None:
        for one in out:
            if not isinstance(one, GlobalArray) or one.sharding != sharding or one.shape != shape:
                raise ShardingError(
                    f"{name}: the result is {shape} in {sharding}, but out is {one!r}; expected a"
                    " DArray of that shape and sharding (without out, the result is a new one)"
                )
        written = tuple(one.local for one in out)
        function(*locals_, **options, out=written if len(out) > 1 else written[0])
        return tuple(out) if len(out) > 1 else out[0]
    result = function(*locals_, **options)
    results = [as_array(one) for one in (result if isinstance(result, tuple) else (result,))]
    made_of = [type(arrays[0])(one, sharding, shape, one.dtype) for one in results]
    return tuple(made_of) if isinstance(result, tuple) else made_of[0]


def _of_parts(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    made: Any,
    out: Sequence[Any] | None,
) -> bool:
    """True if ``function`` of partial sums returns partial sums of the result, up to rounding.

    The result has the dtype of ``made``. Integers wrap around alike in parts and in sums. A float's
    part may overflow or be infinite although the sum is not, and zeros have signs. So for floats
    only sums qualify, and multiples that do not grow.
    """
    if function not in _INTEGER_SUMS and function not in (np.multiply, np.true_divide):
        return False
    dtype = made.dtype
    arrays = [x for x in inputs if isinstance(x, GlobalArray)]
    if len(arrays) == len(inputs):
        of_parts = function in (_INTEGER_SUMS if dtype.kind in "iu" else _SUMS)
    elif dtype.kind != "f":
        of_parts = False
    elif function is np.multiply:
        of_parts = 0 < inputs[isinstance(inputs[0], GlobalArray)] <= 1
    else:
        of_parts = function is np.true_divide and inputs[0] is arrays[0] and 1 <= inputs[1] < np.inf
    alike = [stays_partial(x, "sum", dtype) for x in arrays] + [x.dtype == dtype for x in out or ()]
    return of_parts and all(alike)


def _sample(x: GlobalArray) -> Any:
    """Return an array of one element of the dtype of ``x``, or of none if ``x`` is empty."""
    return array_module(x.local).ones(min(x.size, 1), x.dtype)
