"""Calls in functions that JAX transforms: to JAX each is one function with a derivative.

Going forward, what JAX follows leaves its world: values are recorded, the call is made as always,
and its results enter that world again. Going backward, one pass over the workers gives the
gradients of those values. A function that JAX compiles has no values to send, so that calls in it
are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer

from meshlib import rpc
from meshlib.extend import at_once
from meshlib.extend.jit import is_compiling, is_tracing
from parallel.rpc._contexts import Context, ContextStore
from parallel.rpc._engine import run_pass
from parallel.rpc._graph import RECORDED, Edge, Sink, filled
from parallel.rpc._recorded import Recorded

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def replaced(
    here: ContextStore, request: rpc.PreparedCall, args: Any, kwargs: Any, creates: bool
) -> Any:
    """Return the call that is made in place of ``request(args, kwargs)``; None: that one.

    Raises NotImplementedError for ``remote``, and in a function that JAX compiles; RuntimeError
    outside of a context.
    """
    if not is_tracing():
        return None
    traced = is_traced((args, kwargs))
    if is_compiling():
        if traced or hasattr(request.func, RECORDED):
            raise compiled(f"{request.name} was called remotely")
        return None  # something that the program does once, when it is traced
    if not traced and here.here.token is None:
        return None
    if creates:
        raise NotImplementedError(
            "rpc.remote() was called in a function that JAX differentiates: what stays on the other"
            " worker has no place there; expected rpc_sync() or rpc_async()"
        )
    context = here.here.context
    if context is None:
        raise RuntimeError(
            f"{request.name} was called remotely in a function that JAX differentiates, outside of"
            " any autograd context; expected it inside of `with dist_autograd.context()`"
        )
    return through(here, context, request, args, kwargs)


def compiled(what: str) -> NotImplementedError:
    """Return the error for ``what`` was done in a function that JAX compiles."""
    return NotImplementedError(
        f"{what} in a function that JAX compiles (jax.jit, scan, cond), which runs without Python;"
        " expected it outside, with jax.jit inside of the functions that workers compute"
    )


def is_traced(tree: Any) -> bool:
    """True if JAX follows an array in ``tree``."""
    return bool(_tracers(tree))


def _tracers(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda it: isinstance(it, Recorded))
    return [leaf for leaf in leaves if isinstance(leaf, Tracer)]


def through(here: ContextStore, context: Context, call: Call, args: Any, kwargs: Any) -> TracedCall:
    """Make a remote call; ``wait`` gives its results to the function that JAX differentiates.

    Raises NotImplementedError in a second derivative.
    """
    token = here.here.token if here.here.token is not None else jnp.zeros(())
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda it: isinstance(it, Recorded))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
    traced = [leaves[i] for i in places]
    values = [_value_of(tracer) for tracer in (token, *traced)][1:]
    sinks = [Sink() for _ in places]
    recorded = [
        Recorded(value, context, Edge(sink, 0)) for value, sink in zip(values, sinks, strict=True)
    ]
    args, kwargs = filled(tree, leaves, places, recorded)
    with here.within(context):
        started = call(args, kwargs)
    return TracedCall(here, context, started, token, traced, values, sinks)


def through_here(here: ContextStore, context: Context, call: Call, args: Any, kwargs: Any) -> Any:
    """Compute on this worker what has weights or recorded values among its arguments."""

    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> rpc.Future[Any]:
        done: rpc.Future[Any] = rpc.Future()
        done.set_result(call(args, kwargs))
        return done

    return through(here, context, start, args, kwargs).wait()


@dataclass(eq=False, repr=False)
class TracedCall(rpc.Future[Any]):
    """A call that was made in a function that JAX differentiates. ``wait`` in that function."""

    _here: ContextStore
    _context: Context
    _started: rpc.Future[Any]
    _token: Any
    _traced: list[Any]
    _values: list[Any]
    _sinks: list[Sink]

    def __post_init__(self) -> None:
        super().__init__()
        self.connection: Any = getattr(self._started, "connection", None)
        self._results: list[Any] = []

    def then(self, callback: Any) -> NoReturn:
        """Raise NotImplementedError: callbacks run in other threads, outside of the function."""
        del callback
        raise NotImplementedError(
            "then() was called on a remote call in a function that JAX differentiates, and would"
            " run in another thread; expected wait() in the function"
        )

    def add_done_callback(self, callback: Any) -> NoReturn:
        """Raise NotImplementedError, as ``then``."""
        self.then(callback)

    def __await__(self) -> NoReturn:
        """Raise NotImplementedError: JAX differentiates no coroutine."""
        raise NotImplementedError(
            "await of a remote call in a function that JAX differentiates, which cannot be a"
            " coroutine; expected wait() in the function"
        )

    def done(self) -> bool:
        """True if the call has ended."""
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
        found = self._derivative(recorded)(self._token, self._traced) if recorded else []
        return filled(tree, leaves, places, found)

    def value(self) -> Any:
        """Return the result of a call that has ended, as ``wait`` does."""
        self._started.value()
        return self.wait()

    def exception(self) -> BaseException | None:
        """Return the exception of the call."""
        return self._started.exception()

    def _at_once(self, callback: Any) -> None:
        at_once(self._started, lambda _: callback(self))

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


def _stopped(tracer: Any) -> Any:
    return jax.lax.stop_gradient(tracer)


def _value_of(tracer: Any) -> Any:
    value = _stopped(tracer)
    _check_values(value)
    return jnp.asarray(value)  # of NumPy arrays JAX makes things of its own, which cannot travel


def _check_values(tree: Any) -> None:
    if is_traced(tree):
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "a second derivative was taken of a remote call, or it was batched (vmap): the workers keep"
        " what they need for one. Expected it in a function that jax.grad, value_and_grad, vjp or"
        " dist_autograd.forward differentiate once"
    )
