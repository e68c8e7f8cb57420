"""The primitive behind every collective inside ``jax.jit``, and its transformations.

The rules for derivatives, ``vmap`` and compilation are the same for all collectives. Subclasses of
``InJit`` (``meshlib.jit._kinds``) contain the differences.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshlib._groups.process_group import ProcessGroup
from meshlib.jit._xla.call_site import CallSite
from meshlib.jit._xla.direct import DirectCall
from meshlib.jit._xla.host_calls import host_call, internals
from meshlib.jit._xla.program import HostFunction


@dataclass(frozen=True)
class InJit(ABC):
    """One collective of one operand and one result over ``group``, with all its arguments."""

    group: ProcessGroup

    makes_call = True
    """False if the result is the operand and no call is needed."""

    in_place = False
    """True if the result begins as the operand, in the same memory."""

    is_template = False
    """True if only the operand's shape and dtype matter: the call does not get it."""

    only_sends = False
    """True if the call receives no data: the result is that of ``returned``."""

    operand_has_rows = result_has_rows = False
    """True if dim 0 has one part for each member."""

    anchored = False
    """True if the result depends on another member's data, even if the operand is constant.

    Its tangents and transposes then carry an anchor, a slice of the operand, so that JAX
    differentiates them wherever it differentiates the collective.
    """

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the result's shape and dtype: by default the operand's."""
        return x

    def returned(self, x: jax.Array) -> jax.Array:
        """Return the result of a collective that ``only_sends``: by default the operand."""
        return x

    @abstractmethod
    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        """Return the function that makes the call for operands like ``x`` in a program.

        Runs while the program is compiled, so that each call need not redo work that depends on
        shape and dtype only. The returned function must be written on one line; see
        ``CallSite.name``.
        """

    def direct(self, x: jax.ShapeDtypeStruct) -> DirectCall | None:
        """Return the call for compiled code to make, or None if only Python can make it."""
        del x
        return None

    @abstractmethod
    def transposed(self) -> InJit | None:
        """Return the collective that maps the result's cotangent to the operand's.

        None for a nonlinear collective, which overrides ``tangent``.
        """

    def differential(self) -> InJit:
        """Return the collective that maps the operand's tangent to the result's.

        A linear collective is its own differential, except for the group that makes its calls.
        """
        return self

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        """Return the tangent of ``y = collective(x)`` for the tangent ``t`` of ``x``."""
        del x, y
        return bind(self.differential(), t)

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        """Return the operand of one call for a batch of operands, and the result's batch dim.

        ``x`` holds the batch along ``dim``.
        """
        return x, dim


_collective_p = Primitive("meshlib_collective")


def bind(
    collective: InJit,
    x: jax.Array,
    site: CallSite | None = None,
    anchors: Sequence[jax.Array] = (),
) -> jax.Array:
    """Add ``collective`` to the program that is being traced, or run it now outside of tracing.

    Reports name ``site``, by default the user's nearest line on the stack. The call also depends on
    the ``anchors`` (see ``InJit.anchored``); their values do not matter.
    """
    return _collective_p.bind(x, *anchors, collective=collective, site=site or CallSite.of_caller())


def host_struct(x: jax.ShapeDtypeStruct, has_rows: bool) -> jax.ShapeDtypeStruct:
    """Return the host's shape of arrays like ``x``, (n,) or (rows, n), and their dtype."""
    shape = (x.shape[0], math.prod(x.shape[1:])) if has_rows else (math.prod(x.shape),)
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _compiled(
    x: jax.Array, *anchors: jax.Array, collective: InJit, site: CallSite | None = None
) -> jax.Array:
    if not collective.makes_call:
        return x
    operand = jax.ShapeDtypeStruct(x.shape, x.dtype)
    result = collective.result(operand)
    function = collective.function(operand)
    flat = x.reshape(host_struct(operand, collective.operand_has_rows).shape)
    operands = [] if collective.is_template else [flat]
    out = host_call(
        function if site is None else site.name(function),
        [] if collective.only_sends else [host_struct(result, collective.result_has_rows)],
        *operands,
        # The function does not read them, but they delay the call until they are computed.
        *anchors,
        ordered=True,
        aliases=((0, 0),) if collective.in_place and operands else (),
        reads=not collective.in_place,
        on_gpu=True,
        group=collective.group,
        direct=collective.direct(operand),
        site=site,
    )
    return collective.returned(x) if collective.only_sends else out[0].reshape(result.shape)


def _abstract_eval(x: Any, *_: Any, collective: InJit, site: CallSite) -> Any:
    del site
    result = collective.result(jax.ShapeDtypeStruct(x.shape, x.dtype))
    effects = {internals().ORDERED} if collective.makes_call else set[Any]()
    return jax.core.ShapedArray(result.shape, result.dtype), effects


def _jvp(primals: Any, tangents: Any, *, collective: InJit, site: CallSite) -> tuple[Any, Any]:
    (x, *anchors), (t, *others) = primals, tangents
    y = bind(collective, x, site, anchors)
    moving = [other for other in others if type(other) is not ad.Zero]
    if type(t) is ad.Zero and not moving:
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    t: Any = ad.instantiate_zeros(t)
    if not collective.anchored:
        return y, collective.tangent(x, y, t)
    for other in moving:
        # Adds zero, but makes the dependence visible to an outer transformation.
        t = t + jnp.where(False, other.sum(), 0).astype(t.dtype)
    return y, bind(collective.differential(), t, site, [x.reshape(-1)[:1], *anchors])


def _transpose(cotangent: Any, x: Any, *anchors: Any, collective: InJit, site: CallSite) -> Any:
    del x
    transposed = collective.transposed()
    assert transposed is not None, "only linear collectives appear in tangents"
    # A zero cotangent is also sent: other ranks' losses may depend on their results of this call.
    cotangent = ad.instantiate_zeros(cotangent)
    return [bind(transposed, cotangent, site, anchors), *[None] * len(anchors)]


def _batch(
    operands: Any, dims: Any, *, collective: InJit, site: CallSite
) -> tuple[jax.Array, int | None]:
    (x, *anchors), (dim, *others) = operands, dims
    if dim is None and collective.anchored:  # only the anchors vary: one call for the batch
        size = next(a.shape[d] for a, d in zip(anchors, others, strict=True) if d is not None)
        x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
    anchors = [
        a if d is None else jax.lax.index_in_dim(a, 0, d, keepdims=False)
        for a, d in zip(anchors, others, strict=True)
    ]
    if dim is not None:
        x, dim = collective.batched(x, dim)
    return bind(collective, x, site, anchors), dim


def _run(x: jax.Array, *anchors: jax.Array, collective: InJit, site: CallSite) -> jax.Array:
    # The user's line is on the stack here, so one compiled program serves all lines.
    del site, anchors
    return _program_of_one(x, collective=collective)


_program_of_one = jax.jit(_compiled, static_argnames="collective")
_collective_p.def_impl(_run)
_collective_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[_collective_p] = _jvp
ad.primitive_transposes[_collective_p] = _transpose
batching.primitive_batchers[_collective_p] = _batch
mlir.register_lowering(_collective_p, mlir.lower_fun(_compiled, multiple_results=False))
