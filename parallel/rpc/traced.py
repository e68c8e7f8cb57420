"""Calls in functions that JAX differentiates: to JAX each is one function with a derivative.

Going forward, what JAX follows leaves its world: values are recorded, the call is made as always,
and its results enter that world again. Going backward, one pass over the workers gives the
gradients of those values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer

from meshlib import rpc
from parallel.rpc.contexts import Context, Keeper
from parallel.rpc.engine import run_pass
from parallel.rpc.graph import Edge, Recorded, Sink

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def is_traced(tree: Any) -> bool:
    """Whether JAX follows an array in ``tree``."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda it: isinstance(it, Recorded))
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def through(here: Keeper, context: Context, call: Call, args: Any, kwargs: Any) -> Through:
    """Make a remote call; ``wait`` gives its results to the function that JAX differentiates.

    Raises NotImplementedError where there are no values to send: in ``jax.jit`` and the like.
    """
    token = here.here.token if here.here.token is not None else jnp.zeros(())
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda it: isinstance(it, Recorded))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
    traced = [leaves[i] for i in places]
    values = [_value_of(tracer) for tracer in (token, *traced)][1:]
    sinks = [Sink() for _ in places]
    for i, value, sink in zip(places, values, sinks, strict=True):
        leaves[i] = Recorded(value, context, Edge(sink, 0))
    args, kwargs = jax.tree.unflatten(tree, leaves)
    with here.within(context):
        started = call(args, kwargs)
    return Through(here, context, started, token, traced, values, sinks)


def through_here(here: Keeper, context: Context, call: Call, args: Any, kwargs: Any) -> Any:
    """Compute on this worker what has weights or recorded values among its arguments."""

    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> rpc.Future[Any]:
        done: rpc.Future[Any] = rpc.Future()
        done.set_result(call(args, kwargs))
        return done

    return through(here, context, start, args, kwargs).wait()


class Through(rpc.Future[Any]):
    """A call that was made in a function that JAX differentiates. ``wait`` in that function."""

    def __init__(
        self,
        here: Keeper,
        context: Context,
        started: rpc.Future[Any],
        token: Any,
        traced: list[Any],
        values: list[Any],
        sinks: list[Sink],
    ) -> None:
        super().__init__()
        self._here = here
        self._context = context
        self._started = started
        self._inputs = token, traced
        self._values = values
        self._sinks = sinks
        self._results: list[Any] = []

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._started.done()

    def wait(self, timeout: Any = None) -> Any:
        """Wait for the call; return its result to the function that JAX differentiates."""
        if not self._results:
            self._results.append(self._to_jax(timeout))
        return self._results[0]

    def _to_jax(self, timeout: Any) -> Any:
        result = self._started.wait(timeout)
        leaves, tree = jax.tree.flatten(result, is_leaf=lambda it: isinstance(it, Recorded))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Recorded)]
        recorded: list[Recorded] = [leaves[i] for i in places]
        if recorded:
            found = self._derivative(recorded)(*self._inputs)
            for i, value in zip(places, found, strict=True):
                leaves[i] = value
        return jax.tree.unflatten(tree, leaves)

    def value(self) -> Any:
        """Return what ``wait`` does, of a call that has ended."""
        self._started.value()
        return self.wait()

    def exception(self) -> BaseException | None:
        """Return what the call has failed with."""
        return self._started.exception()

    @property
    def connection(self) -> Any:
        """What the reply is read from, for whoever makes the call."""
        return getattr(self._started, "connection", None)

    @property
    def failure(self) -> BaseException | None:
        """What the call has failed with."""
        return self._started.failure

    def at_once(self, callback: Any) -> None:
        """Have ``callback(self)`` called when the call ends (``wait_all``)."""
        self._started.at_once(lambda _: callback(self))

    def then(self, callback: Any) -> NoReturn:
        """Raise NotImplementedError: JAX differentiates what this thread does."""
        del callback
        raise NotImplementedError(
            "then() was called on a call in a function that JAX differentiates, and would run in"
            " another thread; expected wait() in the function"
        )

    def add_done_callback(self, callback: Any) -> NoReturn:
        """Raise NotImplementedError, as ``then``."""
        self.then(callback)

    def _derivative(self, recorded: list[Recorded]) -> Any:
        here, context, sinks = self._here, self._context, self._sinks
        values = self._values

        @jax.custom_vjp
        def run(token: Any, traced: list[Any]) -> list[Any]:
            del token, traced
            _refuse()

        def forward(token: Any, traced: list[Any]) -> tuple[list[Any], None]:
            _check_values((token, traced))
            return [jnp.asarray(it.value) for it in recorded], None

        def backward(_: None, grads: list[Any]) -> tuple[Any, list[Any]]:
            _check_values(grads)
            roots = [(it.edge, grad) for it, grad in zip(recorded, grads, strict=True)]
            with here.within(context):
                run_pass(here, context, roots, retain=True)
            found = [sink.take() for sink in sinks]
            return jnp.zeros(()), [
                jnp.zeros_like(value) if grad is None else jnp.asarray(grad, value.dtype)
                for grad, value in zip(found, values, strict=True)
            ]

        run.defvjp(forward, backward)
        return run


def _value_of(tracer: Any) -> Any:
    value = jax.lax.stop_gradient(tracer)
    _check_values(value)
    return jnp.asarray(value)  # of NumPy arrays JAX makes things of its own, which cannot travel


def _check_values(tree: Any) -> None:
    if is_traced(tree):
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "a remote call in an autograd context was made inside of jax.jit, vmap, scan, or a second"
        " derivative: there JAX has no values to send yet, and what the function will return is"
        " known to the other worker only. Expected it in a function that jax.grad, value_and_grad,"
        " vjp or dist_autograd.forward differentiate once, with jax.jit around what comes before,"
        " after, and in the remote function"
    )
