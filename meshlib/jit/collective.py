"""The primitive behind every collective inside ``jax.jit``, and how it is transformed.

What differs between collectives is in their ``Kind`` objects (``meshlib.jit.kinds``); the rules
for derivatives, ``vmap`` and compilation are written here once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshlib.jit.host_call import ORDERED, HostArray, host_call
from meshlib.process_group import ProcessGroup


@dataclass(frozen=True)
class InJit(ABC):
    """One collective of one operand and one result over ``group``, with all its arguments."""

    group: ProcessGroup

    in_place = False
    """Whether the result begins as the operand, in the same memory."""

    @abstractmethod
    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the result's shape and dtype for those of the operand."""

    @abstractmethod
    def run(self, output: HostArray, x: HostArray) -> None:
        """Make the call: both arrays are C-contiguous, in the shapes of operand and result."""

    @abstractmethod
    def transposed(self) -> InJit | None:
        """Return the collective that maps the result's cotangent to the operand's.

        None for one that is not linear: it has a ``tangent`` of its own.
        """

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        """Return the tangent of ``y = collective(x)`` for the tangent ``t`` of ``x``."""
        del x, y
        return bind(self, t)

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        """Make the call for all elements of ``x`` along ``dim`` at once; return also their dim."""
        return bind(self, x), dim


_collective_p = Primitive("meshlib_collective")


def bind(collective: InJit, x: jax.Array) -> jax.Array:
    """Make ``collective`` part of the program that is being traced (or make it now)."""
    return _collective_p.bind(x, collective=collective)


def _compiled(x: jax.Array, *, collective: InJit) -> jax.Array:
    result = collective.result(jax.ShapeDtypeStruct(x.shape, x.dtype))

    def run(outputs: Any, inputs: Any, _: Any) -> None:
        collective.run(outputs[0], inputs[0])

    def run_in_place(outputs: Any, _: Any, __: Any) -> None:
        collective.run(outputs[0], outputs[0])

    function, aliases = (run_in_place, ((0, 0),)) if collective.in_place else (run, ())
    return host_call(function, [result], x, ordered=True, aliases=aliases, on_gpu=True)[0]


def _abstract_eval(x: Any, *, collective: InJit) -> Any:
    result = collective.result(jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.core.ShapedArray(result.shape, result.dtype), {ORDERED}


def _jvp(primals: Any, tangents: Any, *, collective: InJit) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = bind(collective, x)
    if type(t) is ad.Zero:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, collective.tangent(x, y, t)


def _transpose(cotangent: Any, x: Any, *, collective: InJit) -> list[Any]:
    transposed = collective.transposed()
    assert transposed is not None, "only the linear ones appear in tangents"
    # Also where nothing depends on the result: the other ranks' results may matter to them.
    return [bind(transposed, ad.instantiate_zeros(cotangent))]


def _batch(operands: Any, dims: Any, *, collective: InJit) -> tuple[jax.Array, int]:
    return collective.batched(operands[0], dims[0])


def front(x: jax.Array, dim: int, position: int = 0) -> jax.Array:
    """Return ``x`` with ``dim`` moved to ``position``."""
    return jnp.moveaxis(x, dim, position)


_collective_p.def_impl(jax.jit(_compiled, static_argnames="collective"))
_collective_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[_collective_p] = _jvp
ad.primitive_transposes[_collective_p] = _transpose
batching.primitive_batchers[_collective_p] = _batch
mlir.register_lowering(_collective_p, mlir.lower_fun(_compiled, multiple_results=False))
