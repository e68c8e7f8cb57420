"""``jit``: programs whose calls are hidden from JAX, which makes them start faster."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from meshlib._groups.process_group import ProcessGroup
from meshlib.jit._xla.host_calls import internals, is_tracing
from meshlib.jit._xla.program import Program

_F = TypeVar("_F", bound=Callable[..., Any])


def jit(fun: _F, **options: Any) -> _F:
    """Return ``jax.jit(fun, **options)`` with a faster start of programs that contain calls.

    JAX starts a program with ordered effects from Python, which is slow. This function keeps the
    effects, and so the order of calls, inside the program, and hides them from JAX outside. Between
    programs, the order is XLA's, which runs one thread's programs one after the other. Inside a
    program that is being traced (another ``jit``, ``grad``, ``vmap`` …) the result behaves like
    ``jax.jit(fun)``.

    Calling the result raises RuntimeError if another thread owns one of the program's groups, and
    the errors of ``jax.jit``.
    """
    return cast("_F", functools.wraps(fun)(_Jitted(fun, options)))


class _Jitted:
    """The function that ``jit`` returns, with the methods of a function of ``jax.jit``."""

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        self._fun = fun
        self._plain = jax.jit(fun, **options)
        self._groups = Program()

        @functools.wraps(fun)
        def traced(*args: Any, **kwargs: Any) -> tuple[Any, jax.Array]:
            return self._traced(*args, **kwargs)

        self._whole = jax.jit(traced, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self._plain(*args, **kwargs)
        self._groups.enter()
        result, self._groups.last = self._whole(*args, **kwargs)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _traced(self, *args: Any, **kwargs: Any) -> tuple[Any, jax.Array]:
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]

        def of_arrays(*arrays: Any) -> Any:
            given = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                given[place] = array
            args, kwargs = jax.tree_util.tree_unflatten(tree, given)
            return self._fun(*args, **kwargs)

        arrays = [leaves[place] for place in places]
        jaxpr, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        for group in set(_groups_of(jaxpr.jaxpr)):
            self._groups.add_group(group)
        self._groups.enter()
        # JAX must see other libraries' effects, so a program with one of them hides nothing.
        hides = internals().are_ours(jaxpr.effects)
        results = (_whole_p.bind if hides else _evaluate)(*arrays, jaxpr=jaxpr)
        tree = jax.tree_util.tree_structure(shapes)
        # JAX would drop a program without results, so ``done`` is always a result.
        *results, done = results if hides else (*results, jnp.uint8(0))
        return jax.tree_util.tree_unflatten(tree, results), done


def _groups_of(jaxpr: Jaxpr) -> Iterator[ProcessGroup]:
    """Yield the groups on which the program ``jaxpr`` makes calls."""
    for equation in jaxpr.eqns:
        for value in jax.tree_util.tree_leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))
        ):
            if isinstance(value, ClosedJaxpr):
                yield from _groups_of(value.jaxpr)
            elif isinstance(value, Jaxpr):
                yield from _groups_of(value)
            elif isinstance(group := getattr(value, "group", value), ProcessGroup):
                yield group


def _evaluate(*arrays: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*arrays)


def _with_one_more(*arrays: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return [*_evaluate(*arrays, jaxpr=jaxpr), jnp.uint8(0)]


def _results(*_: Any, jaxpr: ClosedJaxpr) -> list[Any]:
    return [*jaxpr.out_avals, jax.core.ShapedArray((), jnp.uint8)]


def _lower(ctx: Any, *arrays: Any, jaxpr: ClosedJaxpr) -> Any:
    inside = internals().with_first_token(ctx)
    return mlir.lower_fun(_with_one_more, multiple_results=True)(inside, *arrays, jaxpr=jaxpr)


_whole_p = Primitive("meshlib_program")
_whole_p.multiple_results = True
_whole_p.def_abstract_eval(_results)
mlir.register_lowering(_whole_p, _lower)
