"""What a function on another worker would return: shapes and dtypes, found without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from meshlib import rpc
from parallel.arrays import written
from parallel.rpc.contexts import keeper
from parallel.rpc.graph import RETURNS, Recorded, filled
from parallel.rpc.weights import Weights


class Shape(NamedTuple):
    """An array that is not there yet."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return written(self)


def is_ours(leaf: Any) -> bool:
    """Whether JAX is not to look into a value."""
    return isinstance(leaf, Recorded | Weights | Shape)


def result_of(request: rpc.Request, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a call would return, with ``Shape``s in place of arrays, as in its arguments.

    That is what the function's author has said (``returns``), else what it comes to when JAX traces
    it on the callee. Raises TypeError where JAX cannot, and what the function raises then.
    """
    returns = getattr(request.func, RETURNS, None)
    if returns is None:
        asked = request._replace(func=abstract_result, what=f"the shape of {request.name}")
        return asked((request.func, args, kwargs), {}).wait()
    if callable(returns):
        args, kwargs = jax.tree.map(to_struct, (args, kwargs), is_leaf=is_ours)
        returns = returns(*args, **kwargs)
    return jax.tree.map(to_shape, returns)


def abstract_result(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the callee: trace ``func``."""
    here = keeper()
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_ours)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Shape)]
    structure: list[Any] = []

    def call(values: list[Any]) -> list[Any]:
        args, kwargs = filled(tree, leaves, places, values)
        with here.within(None, tracing=True):
            out, out_tree = jax.tree.flatten(func(*args, **kwargs), is_leaf=is_ours)
        structure[:] = out, out_tree
        return [leaf for leaf in out if hasattr(leaf, "dtype")]

    name = getattr(func, "__qualname__", repr(func))
    if rpc.functions.is_async(func):
        raise _unknown(name, "it is marked with async_execution")
    try:
        arrays = iter(jax.eval_shape(call, [to_struct(leaves[i]) for i in places]))
    except jax.errors.JAXTypeError as error:
        raise _unknown(name, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    out, out_tree = structure
    for i, leaf in enumerate(out):
        if hasattr(leaf, "dtype"):
            out[i] = to_shape(next(arrays))
        elif is_ours(leaf) or isinstance(leaf, rpc.Future | rpc.RRef):
            raise _unknown(name, f"it has returned {leaf!r}")
    return jax.tree.unflatten(out_tree, out)


def to_shape(array: Any) -> Shape:
    """Return an array's shape and dtype. Raises TypeError for JAX's random keys."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            f"an array of {array.dtype} is in a remote call in a function that JAX compiles;"
            " expected arrays of numbers (jax.random.key_data gives those of a key)"
        )
    return Shape(tuple(array.shape), np.dtype(array.dtype))


def to_struct(leaf: Any) -> Any:
    """Return what JAX has for a ``Shape``; anything else itself."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, Shape) else leaf


def _unknown(name: str, why: str) -> TypeError:
    return TypeError(
        f"{name} was called in a function that JAX compiles, and JAX cannot tell the shapes of what"
        f" it returns: {why}. Expected a function of JAX arrays that returns arrays, or one under"
        " dist_autograd.function(returns=...)"
    )
