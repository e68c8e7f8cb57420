"""Remote calls in functions that JAX differentiates: each is a function with its own derivative.

In forward, traced values are converted to recorded values, the call is made as usual, and its
results are converted back. In backward, one pass over the workers computes the gradients of the
traced values. Calls in a function that JAX compiles raise an error, because it has no values to
send.
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
    store: ContextStore, request: rpc.PreparedCall, args: Any, kwargs: Any, creates: bool
) -> Any:
    """Return a call to use in place of ``request(args, kwargs)``, or None to make that call.

    Raises NotImplementedError for ``remote``, and in a function that JAX compiles; RuntimeError
    outside of a context.
    """
    if not is_tracing():
        return None
    traced = is_traced((args, kwargs))
    if is_compiling():
        if traced or hasattr(request.func, RECORDED):
            raise compiled(f"{request.name} was called remotely")
        return None  # an ordinary call, made once while the program is traced
    if not traced and store.thread.token is None:
        return None
    if creates:
        raise NotImplementedError(
            "rpc.remote() was called in a function that JAX differentiates, which cannot use a"
            " value on another worker; expected rpc_sync() or rpc_async()"
        )
    context = store.thread.context
    if context is None:
        raise RuntimeError(
            f"{request.name} was called remotely in a function that JAX differentiates, outside of"
            " any autograd context; expected it inside `with dist_autograd.context()`"
        )
    return through(store, context, request, args, kwargs)


def compiled(what: str) -> NotImplementedError:
    """Return the error for a call, described by ``what``, in a function that JAX compiles."""
    return NotImplementedError(
        f"{what} in a function that JAX compiles (jax.jit, scan, cond), which runs without Python;"
        " expected it outside, with jax.jit inside the functions that workers compute"
    )


def is_traced(tree: Any) -> bool:
    """True if JAX traces an array in ``tree``."""
    return bool(_tracers(tree))


def _tracers(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Recorded))
    return [leaf for leaf in leaves if isinstance(leaf, Tracer)]


def through(
    store: ContextStore, context: Context, call: Call, args: Any, kwargs: Any
) -> TracedCall:
    """Make a remote call whose ``wait`` returns traced results to JAX's function.

    Raises NotImplementedError in a second derivative.
    """
    token = store.thread.token if store.thread.token is not None else jnp.zeros(())
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda node: isinstance(node, Recorded))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
    traced = [leaves[i] for i in places]
    values = [_value_of(tracer) for tracer in (token, *traced)][1:]
    sinks = [Sink() for _ in places]
    recorded = [
        Recorded(value, context, Edge(sink, 0)) for value, sink in zip(values, sinks, strict=True)
    ]
    args, kwargs = filled(tree, leaves, places, recorded)
    with store.within(context):
        started = call(args, kwargs)
    return TracedCall(store, context, started, token, traced, values, sinks)


def through_local_call(
    store: ContextStore, context: Context, call: Call, args: Any, kwargs: Any
) -> Any:
    """Make a differentiable call on this worker, with weights or recorded values as arguments."""

    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> rpc.Future[Any]:
        done: rpc.Future[Any] = rpc.Future()
        done.set_result(call(args, kwargs))
        return done

    return through(store, context, start, args, kwargs).wait()


@dataclass(eq=False, repr=False)
class TracedCall(rpc.Future[Any]):
    """A remote call in a function that JAX differentiates, which must ``wait`` for it."""

    _store: ContextStore
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
            "then() was called on a remote call in a function that JAX differentiates, but would"
            " run in another thread; expected wait() in the function"
        )

    def add_done_callback(self, callback: Any) -> NoReturn:
        """Raise NotImplementedError, like ``then``."""
        self.then(callback)

    def __await__(self) -> NoReturn:
        """Raise NotImplementedError: JAX cannot differentiate coroutines."""
        raise NotImplementedError(
            "a remote call was awaited in a function that JAX differentiates, which cannot be a"
            " coroutine; expected wait() in the function"
        )

    def done(self) -> bool:
        """True if the call has ended."""
        return self._started.done()

    def wait(self, timeout: Any = None) -> Any:
        """Wait for the call; return its result as traced values."""
        if not self._results:
            self._results.append(self._to_jax(timeout))
        return self._results[0]

    def _to_jax(self, timeout: Any) -> Any:
        result = self._started.wait(timeout)
        leaves, tree = jax.tree.flatten(result, is_leaf=lambda node: isinstance(node, Recorded))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Recorded)]
        recorded: list[Recorded] = [leaves[i] for i in places]
        traced = self._differentiable(recorded)(self._token, self._traced) if recorded else []
        return filled(tree, leaves, places, traced)

    def value(self) -> Any:
        """Return the result of a completed call, like ``wait``."""
        self._started.value()
        return self.wait()

    def exception(self) -> BaseException | None:
        """Return the exception of the call."""
        return self._started.exception()

    def _at_once(self, callback: Any) -> None:
        at_once(self._started, lambda _: callback(self))

    def _differentiable(self, recorded: list[Recorded]) -> Any:
        store, context, sinks = self._store, self._context, self._sinks
        values = self._values

        @jax.custom_vjp
        def run(token: Any, traced: list[Any]) -> list[Any]:
            del token, traced
            _refuse()

        def forward(token: Any, traced: list[Any]) -> tuple[list[Any], None]:
            _check_values((token, traced))
            return [jnp.asarray(r.value) for r in recorded], None

        def backward(_: None, grads: list[Any]) -> tuple[Any, list[Any]]:
            _check_values(grads)
            roots = [(r.edge, grad) for r, grad in zip(recorded, grads, strict=True)]
            with store.within(context):
                run_pass(store, context, roots, retain=True)
            input_grads = [sink.take() for sink in sinks]
            return jnp.zeros(()), [
                jnp.zeros_like(value) if grad is None else jnp.asarray(grad, value.dtype)
                for grad, value in zip(input_grads, values, strict=True)
            ]

        run.defvjp(forward, backward)
        return run


def _stopped(tracer: Any) -> Any:
    return jax.lax.stop_gradient(tracer)


def _value_of(tracer: Any) -> Any:
    value = _stopped(tracer)
    _check_values(value)
    return jnp.asarray(value)  # JAX may wrap a NumPy array in a type that cannot be sent


def _check_values(tree: Any) -> None:
    if is_traced(tree):
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "a remote call was differentiated twice or batched (vmap), but workers only store data for"
        " one derivative; expected it in a function that jax.grad, value_and_grad, vjp or"
        " dist_autograd.forward differentiate once"
    )
