"""``forward``: recorded computation of JAX functions and modules in an autograd context."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

from meshlib import rpc
from parallel._checks import describe
from parallel._nested import all_leaves
from parallel.nn._module import Module
from parallel.rpc._contexts import Context, ContextStore, context_store
from parallel.rpc._graph import RECORDED, Edge, Node, filled
from parallel.rpc._modules import apply_module
from parallel.rpc._recorded import Recorded


class Weights:
    """A trained pytree of JAX arrays, ``value``, on one worker.

    Optimizers replace ``value``; each ``forward`` uses the current one. Refer to it by an RRef,
    ``rpc.remote(to, Weights, (value,))``. Remote calls send the value itself. In an autograd
    context they send recorded arrays, so gradients return to this object.

    Raises TypeError for leaves that are not floating-point or complex arrays.
    """

    def __init__(self, value: Any) -> None:
        import jax

        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            where = jax.tree_util.keystr(path)
            if not hasattr(leaf, "dtype") or not jax.numpy.issubdtype(
                leaf.dtype, jax.numpy.inexact
            ):
                raise TypeError(
                    f"value{where} must be a floating-point or complex array, got {describe(leaf)}"
                )
        self.value: Any = jax.tree.map(jax.numpy.asarray, value)

    def __repr__(self) -> str:
        return f"Weights({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if rpc.pickled_for() is None:
            return Weights, (self.value,)
        context = context_store().thread.context
        value = self.value if context is None else record(context, self)
        return _itself, (value,)


def _itself(value: Any) -> Any:
    return value


class WeightsNode(Node):
    """The leaf node of trained weights, whose gradients are stored in the context."""

    def __init__(self, context: Context, weights: Weights, outputs: int) -> None:
        super().__init__((), outputs)
        self._context = context
        self._weights = weights

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        del retain
        import jax

        leaves, tree = jax.tree.flatten(self._weights.value)
        pairs = zip(grads, leaves, strict=True)
        whole = [jax.numpy.zeros_like(leaf) if grad is None else grad for grad, leaf in pairs]
        self._context.add_gradient(self._weights, jax.tree.unflatten(tree, whole))
        return ()


def record(context: Context, weights: Weights) -> Any:
    """Return the current weights as recorded arrays."""
    import jax

    leaves, tree = jax.tree.flatten(weights.value)
    leaf = context.leaf(weights, lambda: WeightsNode(context, weights, len(leaves)))
    recorded = [Recorded(value, context, Edge(leaf, i)) for i, value in enumerate(leaves)]
    return jax.tree.unflatten(tree, recorded)


F = TypeVar("F", bound=Callable[..., Any])


def forward(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute ``fn(*args, **kwargs)``, and record it in the context for ``backward``.

    In an autograd context, floating-point and complex arrays in the result of ``fn`` become
    ``Recorded`` values. Outside of any context, and without recorded arguments, ``fn`` is called
    without recording.

    Args:
        fn: A function of JAX arrays (also one of ``jax.jit``), or a ``parallel.nn`` module. The
            function may make remote calls, which are differentiated as well.
        args: Arrays, recorded values, ``Weights``, RRefs to these on this worker, or tuples, lists
            and dicts of these; ``fn`` gets arrays in their place. Other objects are passed on. A
            module accepts only arrays and recorded values.
        kwargs: Keyword arguments, likewise.

    Returns:
        The result of ``fn``, a pytree.

    Raises RuntimeError if the context has ended, and ValueError for values of different contexts.
    Raises NotImplementedError for a module in evaluation mode with recorded arguments, and for
    recorded values or ``Weights`` in a function that JAX compiles. Raises the errors of ``fn``.
    """
    args, kwargs = _mapped(_localized, (args, kwargs))
    try:
        store = context_store()
    except (RuntimeError, ValueError):  # without RPC or a process group, contexts do not exist
        store = None
    if store is None:
        args, kwargs = _values((args, kwargs))
        return fn(*args, **kwargs)
    if "jax" in sys.modules and not isinstance(fn, Module):
        from meshlib.extend.jit import is_compiling

        if is_compiling():
            _refuse_trainable(fn, (args, kwargs))
            return fn(*args, **kwargs)
    context = _context_of(store, (args, kwargs))
    if context is not None:
        context.check()
    if isinstance(fn, Module):
        return apply_module(store, context, fn, args, kwargs)
    if context is None:
        args, kwargs = _values((args, kwargs))
        return fn(*args, **kwargs)
    from parallel.rpc._traced import is_traced, through_local_call

    if store.thread.token is None and not is_traced((args, kwargs)):
        with store.within(context):
            return _apply(store, context, fn, args, kwargs)
    if any(isinstance(leaf, Recorded | Weights) for leaf in _leaves((args, kwargs))):
        return through_local_call(store, context, lambda a, k: forward(fn, *a, **k), args, kwargs)
    return fn(*args, **kwargs)


def function(fn: F) -> F:
    """Decorate a function of JAX arrays so that its local and remote calls use ``forward``.

    For example, ``rpc_sync("worker1", fn, (weights_rref, x))``, with an RRef to ``Weights`` on that
    worker, is differentiated there.

    Args:
        fn: The function, which its callees must be able to import.

    Returns:
        The function.
    """

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(fn, *args, **kwargs)

    setattr(wrapper, RECORDED, True)
    return cast(F, wrapper)


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function for the value and gradient of ``fn``, like ``jax.value_and_grad``.

    All remote calls of ``fn``, and this worker's ``Weights`` that it uses, get their gradients in
    the open context. (``jax.value_and_grad`` itself would skip those that do not depend on
    ``argnums``.)

    Args:
        fn: A function of JAX arrays or pytrees of arrays that returns a scalar.
        argnums: The positional arguments with respect to which to differentiate.
        has_aux: ``fn`` returns a pair, whose second part is not differentiated.

    Returns:
        A function with the same results as that of ``jax.value_and_grad``.
    """
    import jax
    import jax.numpy as jnp

    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        store = context_store()

        def with_token(token: Any, *args: Any, **kwargs: Any) -> Any:
            with store.within(store.thread.context, token):
                return fn(*args, **kwargs)

        where = (0, *(n + 1 if n >= 0 else n for n in numbers))
        both = jax.value_and_grad(with_token, where, has_aux)
        value, (_, *grads) = both(jnp.zeros(()), *args, **kwargs)
        return value, grads[0] if isinstance(argnums, int) else tuple(grads)

    return wrapper


class Applied(Node):
    """A call of a JAX function; ``vjp`` maps the results' gradients to the inputs' gradients."""

    def __init__(
        self, what: str, vjp: Any, inputs: Sequence[Edge | None], results: Sequence[Any]
    ) -> None:
        super().__init__(inputs, len(results))
        self._what = what
        self._vjp = vjp
        self._specs = [(result.shape, result.dtype) for result in results]

    def backward(self, grads: list[Any], retain: bool) -> Sequence[Any]:
        import jax.numpy as jnp

        vjp: Any = self._vjp
        if not retain:
            self._vjp = None
            self.spent: str = (
                f"an earlier backward() has freed the graph of {self._what}; expected"
                " backward(..., retain_graph=True) the first time"
            )
        cotangents = [
            jnp.zeros(shape, dtype) if grad is None else jnp.asarray(grad, dtype)
            for grad, (shape, dtype) in zip(grads, self._specs, strict=True)
        ]
        _, input_grads = vjp(cotangents)
        return input_grads


def _apply(
    store: ContextStore, context: Context, fn: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    import jax
    import jax.numpy as jnp

    def recorded(leaf: Any) -> Any:
        return record(context, leaf) if isinstance(leaf, Weights) else leaf

    args, kwargs = jax.tree.map(recorded, (args, kwargs), is_leaf=_is_trainable)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_trainable)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Recorded)]
    inputs = [leaves[i].edge for i in places]
    structure: list[Any] = []

    def call(token: Any, primals: list[Any]) -> tuple[list[Any], list[Any]]:
        args, kwargs = filled(tree, leaves, places, primals)
        with store.within(context, token):
            result = fn(*args, **kwargs)
        out, out_tree = jax.tree.flatten(result, is_leaf=_is_trainable)
        arrays = [i for i, leaf in enumerate(out) if _is_array(leaf)]
        floating = [i for i in arrays if jnp.issubdtype(out[i].dtype, jnp.inexact)]
        others = sorted(set(arrays) - set(floating))
        constants = [None if _is_array(leaf) else leaf for leaf in out]
        structure[:] = constants, out_tree, [*floating, *others]
        return [out[i] for i in floating], [out[i] for i in others]

    primals = [jnp.asarray(leaves[i].value) for i in places]
    values, vjp, others = jax.vjp(call, jnp.zeros(()), primals, has_aux=True)
    constants, out_tree, where = structure
    name = getattr(fn, "__qualname__", repr(fn))
    node = Applied(name, vjp, inputs, values)
    results = [Recorded(value, context, Edge(node, i)) for i, value in enumerate(values)]
    return filled(out_tree, constants, where, [*results, *others])


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, Recorded)


def _is_trainable(value: Any) -> bool:
    return isinstance(value, Recorded | Weights)


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree, is_leaf=_is_trainable)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested plain tuples, lists and dicts with ``change`` applied to their leaves."""
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(change, entry) for entry in tree)
    if type(tree) is dict:
        return {name: _mapped(change, entry) for name, entry in tree.items()}
    return change(tree)


def _localized(leaf: Any) -> Any:
    """Return this worker's weights or recorded value in place of an RRef to it."""
    if not isinstance(leaf, rpc.RRef):
        return leaf
    rref: rpc.RRef[Any] = leaf
    value = rref.local_value() if rref.is_owner() else None
    return value if _is_trainable(value) else rref


def _refuse_trainable(fn: Any, tree: Any) -> None:
    """Raise NotImplementedError for values that a compiled function would make constants."""
    from parallel.rpc._traced import compiled

    for leaf in _leaves(tree):
        if _is_trainable(leaf):
            name = getattr(fn, "__qualname__", repr(fn))
            raise compiled(f"{name} was called with {type(leaf).__name__}")


def _values(tree: Any) -> Any:
    """Return ``tree`` with arrays in place of weights."""
    return _mapped(lambda leaf: leaf.value if isinstance(leaf, Weights) else leaf, tree)


def _context_of(store: ContextStore, tree: Any) -> Context | None:
    """Return the context of the calling thread, or else of the values in ``tree``."""
    found = store.thread.context
    for _, leaf in all_leaves(tree):
        if isinstance(leaf, Recorded):
            if found is not None and leaf.context is not found:
                raise ValueError(
                    f"a value was recorded in the context {leaf.context.id}, but is used in the"
                    f" context {found.id}; expected values of one context"
                )
            found = store.enter(leaf.context.id)
    return found
