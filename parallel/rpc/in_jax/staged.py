"""Remote calls in programs that JAX compiles (``jax.jit``, ``scan``): made when the program runs.

When the program is traced there are no values. The callee is asked for the shapes of what it would
return, and the call becomes one of the program's ordered calls of Python: with a ``custom_vjp``, so
that going backward is another one. What was recorded going forward stays with the context, under a
number, which is all that the program itself keeps of it. The context is the one that is open where
the program is run: JAX traces once, and runs often.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import sequential_vmap

from meshlib import rpc
from meshlib.jit import HostArray, HostFunction, Program, host_call
from parallel.rpc.contexts import Context, Keeper, keeper
from parallel.rpc.engine import run_pass
from parallel.rpc.graph import Edge, Recorded, Sink, filled
from parallel.rpc.in_jax.shapes import Shape, is_ours, result_of, to_shape, to_struct
from parallel.rpc.weights import Weights, record


@dataclass(frozen=True)
class _Owner:
    """For whom a program with remote calls runs: a worker, in a context."""

    keeper: Keeper
    context: Context | None
    behalf: rpc.Behalf = field(compare=False)

    def __str__(self) -> str:
        inside = "no context" if self.context is None else f"the context {self.context.id}"
        return f"rank {self.keeper.rank} in {inside}"

    @property
    def patience(self) -> float:
        return self.behalf.patience

    def waiting(self) -> AbstractContextManager[object]:
        return self.behalf.waiting()

    @contextmanager
    def entered(self, alone: bool) -> Generator[None]:
        """Have the calling thread, one of XLA's, make calls as the one that runs the program."""
        with self.behalf.adopted(serving=alone), self.keeper.within(self.context):
            yield

    def recording(self) -> Context:
        """Return the context. Raises RuntimeError where there is none."""
        if self.context is None:
            raise RuntimeError(
                "a program of jax.jit that differentiates through a remote call, or through weights"
                " of a worker, was run outside of any autograd context; expected it inside of"
                " `with dist_autograd.context()`"
            )
        self.context.check()
        return self.context


def _owner() -> _Owner:
    here = keeper()
    return _Owner(here, here.here.context, rpc.behalf())


class _Travelling:
    """An array of a program's, copied; it arrives as JAX's."""

    def __init__(self, value: HostArray) -> None:
        self.value = np.array(value)

    def __reduce__(self) -> tuple[Any, ...]:
        return jnp.asarray, (self.value,)


class InFunction(rpc.Future[Any]):
    """A call that was made in a function that JAX transforms. ``wait`` in that function."""

    connection: Any = None
    """What the reply is read from, for whoever makes the call."""

    def then(self, callback: Any) -> NoReturn:
        """Raise NotImplementedError: callbacks run in other threads, outside of the function."""
        del callback
        raise NotImplementedError(
            "then() was called on a remote call in a function that JAX differentiates or compiles,"
            " and would run in another thread; expected wait() in the function"
        )

    def add_done_callback(self, callback: Any) -> NoReturn:
        """Raise NotImplementedError, as ``then``."""
        self.then(callback)


class _Call(NamedTuple):
    """One call in a program: all of it but the values of its arguments that JAX traces."""

    request: rpc.Request
    leaves: list[Any]
    tree: Any
    places: list[int]
    followed: list[bool]
    """Which of the traced arguments may have derivatives."""
    results: list[Shape]

    def make(self, values: Sequence[Any]) -> list[Any]:
        """Make the call with these values, wait, and return its arrays."""
        args, kwargs = filled(self.tree, self.leaves, self.places, values)
        result = self.request(args, kwargs).wait()
        found = [leaf for leaf in jax.tree.leaves(result, is_leaf=is_ours) if _is_array(leaf)]
        said = [to_shape(it) for it in found]
        if said != self.results:
            raise TypeError(
                f"{self.request.name} has returned {_told(said)}, and was expected to return"
                f" {_told(self.results)} when the program was traced"
            )
        return found


def stage(here: Keeper, request: rpc.Request, args: Any, kwargs: Any, token: Any) -> InFunction:
    """Make a call part of the program that is being traced.

    Raises TypeError where it cannot be found out what the function returns, or an argument is a
    recorded value; and what the function raises while it is traced on the callee.
    """
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_ours)
    refuse_recorded(leaves)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
    traced = [leaves[i] for i in places]
    for i in places:
        leaves[i] = to_shape(leaves[i])
    with here.within(None):
        result = result_of(request, *jax.tree.unflatten(tree, leaves))
    out, out_tree = jax.tree.flatten(result, is_leaf=lambda leaf: isinstance(leaf, Shape))
    arrays = [i for i, leaf in enumerate(out) if isinstance(leaf, Shape)]
    followed = [jnp.issubdtype(it.dtype, jnp.inexact) for it in traced]
    call = _Call(request, leaves, tree, places, followed, [out[i] for i in arrays])
    staged = InFunction()
    values = _differentiable(call)(_usable(token), traced)
    staged.set_result(filled(out_tree, out, arrays, values))
    return staged


def weights_in_program(weights: Weights, token: Any) -> Any:
    """Return what weights of this worker are when the program runs that is being traced."""
    leaves, tree = jax.tree.flatten(weights.value)
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    said = [to_shape(leaf) for leaf in leaves]

    def values_of(leaves: list[Any]) -> list[Any]:
        found = [to_shape(leaf) for leaf in leaves]
        if found != said:
            raise TypeError(
                f"weights of this worker are {_told(found)}, and were {_told(said)} when the"
                " program was traced"
            )
        return leaves

    def read(outputs: Sequence[HostArray], _: object, program: Program) -> None:
        if program.owner.context is not None:
            raise _lost("weights of this worker were used")
        _write(outputs, values_of(jax.tree.leaves(weights.value)))

    def read_recorded(outputs: Sequence[HostArray], _: object, program: Program) -> None:
        context = program.owner.recording()
        recorded = values_of(jax.tree.leaves(record(context, weights), is_leaf=is_ours))
        outputs[0][...] = context.keep((recorded, []))
        _write(outputs[1:], [it.value for it in recorded])

    run = _derived(read, read_recorded, specs, [])
    return jax.tree.unflatten(tree, run(_usable(token), []))


def refuse_recorded(leaves: Sequence[Any]) -> None:
    """Raise TypeError where there is a recorded value in a function that is being compiled."""
    for leaf in leaves:
        if isinstance(leaf, Recorded):
            raise TypeError(
                f"a recorded value ({leaf!r}) was used in a function that JAX compiles, which would"
                " be that of one step for ever; expected dist_autograd.forward(function, value)"
                " around the compiled function"
            )


def _differentiable(call: _Call) -> Any:
    def make(outputs: Sequence[HostArray], inputs: Sequence[HostArray], program: Program) -> None:
        owner: _Owner = program.owner
        with owner.entered(program.runs == 1):
            found = call.make([_Travelling(value) for value in inputs])
            if any(isinstance(it, Recorded) for it in found):
                raise _lost(f"{call.request.name} was called")
            _write(outputs, found)

    def make_recorded(
        outputs: Sequence[HostArray], inputs: Sequence[HostArray], program: Program
    ) -> None:
        owner: _Owner = program.owner
        context = owner.recording()
        sinks = [Sink() for followed in call.followed if followed]
        edges = iter([Edge(sink, 0) for sink in sinks])
        values: list[Any] = [_Travelling(value) for value in inputs]
        for i, followed in enumerate(call.followed):
            if followed:
                values[i] = Recorded(values[i], context, next(edges))
        with owner.entered(program.runs == 1):
            found = call.make(values)
        said = zip(found, call.results, strict=True)
        recorded = [it for it, like in said if jnp.issubdtype(like.dtype, jnp.inexact)]
        outputs[0][...] = context.keep((recorded, sinks))
        _write(outputs[1:], found)

    traced = [call.leaves[i] for i in call.places]
    pairs = zip(traced, call.followed, strict=True)
    wanted = [to_struct(it) if followed else None for it, followed in pairs]
    return _derived(make, make_recorded, [*map(to_struct, call.results)], wanted)


def _derived(
    make: HostFunction,
    make_recorded: HostFunction,
    results: Sequence[jax.ShapeDtypeStruct],
    wanted: Sequence[jax.ShapeDtypeStruct | None],
) -> Any:
    """Return the function of a token and arrays that is ``make`` in a program.

    Where JAX differentiates it, it is ``make_recorded``, which gives a number before the
    ``results``: that of what it has recorded, for ``_go_back``. ``wanted`` is what the derivatives
    by the arrays are like, None where there is none.
    """
    floating = [jnp.issubdtype(it.dtype, jnp.inexact) for it in results]

    @jax.custom_vjp
    def run(token: Any, arrays: list[Any]) -> list[Any]:
        del token
        return _in_order(make, results, *arrays)

    def forward(token: Any, arrays: list[Any]) -> tuple[list[Any], Any]:
        del token
        number, *values = _in_order(make_recorded, [_NUMBER, *results], *arrays)
        return values, number

    def backward(number: Any, grads: list[Any]) -> tuple[Any, list[Any]]:
        given = [grad for grad, has in zip(grads, floating, strict=True) if has]
        specs = [it for it in wanted if it is not None]
        found = iter(_in_order(_go_back, specs, number, *given))
        return jnp.zeros(()), [None if it is None else next(found) for it in wanted]

    run.defvjp(forward, backward)
    return run


def _go_back(outputs: Sequence[HostArray], inputs: Sequence[HostArray], program: Program) -> None:
    """Go back from what was recorded under a number, given the gradients of its values."""
    owner: _Owner = program.owner
    context = owner.recording()
    number, *grads = inputs
    recorded, sinks = context.kept(int(number))
    roots = [
        (it.edge, jnp.asarray(np.array(grad)))
        for it, grad in zip(recorded, grads, strict=True)
        if isinstance(it, Recorded)
    ]
    with owner.entered(program.runs == 1):
        run_pass(owner.keeper, context, roots, retain=True)
    for output, sink in zip(outputs, sinks, strict=True):
        grad = sink.take()
        output[...] = 0 if grad is None else np.asarray(grad)


_NUMBER = jax.ShapeDtypeStruct((), np.uint32)


def _in_order(
    function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *operands: Any
) -> list[Any]:
    """Have the program call ``function``, once for each element where it is batched (``vmap``)."""

    @jax.custom_vjp
    @sequential_vmap
    def call(*operands: Any) -> list[Any]:
        return host_call(function, results, *operands, ordered=True, owner=_owner)

    call.defvjp(_refuse, _refuse)
    return call(*operands)


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "a second derivative was taken of a remote call, or of weights of a worker, in a function"
        " that JAX compiles: workers keep what they need for one. Expected jax.grad, value_and_grad"
        " or vjp once"
    )


def _usable(token: Any) -> Any:
    return jnp.zeros(()) if token is None else token


def _write(outputs: Sequence[HostArray], values: Sequence[Any]) -> None:
    for output, value in zip(outputs, values, strict=True):
        output[...] = np.asarray(value.value if isinstance(value, Recorded) else value)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _told(shapes: Sequence[Shape]) -> str:
    return "[" + ", ".join(map(str, shapes)) + "]"


def _lost(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} in a program of jax.jit, in an autograd context, with nothing among the arguments"
        " that JAX differentiates by: gradients would be lost unseen. Expected"
        " dist_autograd.value_and_grad in place of jax's, which has them all; or, where no gradient"
        " is wanted, the program outside of the context"
    )
