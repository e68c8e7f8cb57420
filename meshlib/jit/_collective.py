"""The primitive behind every collective inside ``jax.jit``, and how it is transformed.

What differs between collectives is in their ``Kind`` objects (``meshlib.jit._kinds``); the rules
for derivatives, ``vmap`` and compilation are written here once.
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
    """True if a call is needed: if not, the result is the operand."""

    in_place = False
    """True if the result begins as the operand, in the same memory."""

    is_template = False
    """True if only the operand's shape and dtype matter: the call is made without it."""

    only_sends = False
    """True if no data comes back: the result is the operand itself, or the one of ``returned``."""

    operand_has_rows = result_has_rows = False
    """True if dim 0 has one part for each member."""

    anchored = False
    """True if the result depends on another member's data, even if the operand is constant.

    Its tangents and transposes then carry an anchor, a slice of its data. So they are
    differentiated wherever it is.
    """

    def result(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the result's shape and dtype: by default the operand's."""
        return x

    def returned(self, x: jax.Array) -> jax.Array:
        """Return the result where it ``only_sends``."""
        return x

    @abstractmethod
    def function(self, x: jax.ShapeDtypeStruct) -> HostFunction:
        """Return the function that makes the call for operands like ``x`` in a program.

        It is asked for while the program is compiled: what shape and dtype settle is done here,
        and not in each call. Written on one line: see ``CallSite.name``.
        """

    def direct(self, x: jax.ShapeDtypeStruct) -> DirectCall | None:
        """Return the same call as compiled code may make it; None: only Python can."""
        del x
        return None

    @abstractmethod
    def transposed(self) -> InJit | None:
        """Return the collective that maps the result's cotangent to the operand's.

        None for one that is not linear: it has a ``tangent`` of its own.
        """

    def differential(self) -> InJit:
        """Return the collective that maps the operand's tangent to the result's, of a linear one.

        Itself, except for the number under which it is made.
        """
        return self

    def tangent(self, x: jax.Array, y: jax.Array, t: jax.Array) -> jax.Array:
        """Return the tangent of ``y = collective(x)`` for the tangent ``t`` of ``x``."""
        del x, y
        return bind(self.differential(), t)

    def batched(self, x: jax.Array, dim: int) -> tuple[jax.Array, int]:
        """Return the operand of one call for all elements of ``x`` along ``dim``.

        And the dim along which they are in its result.
        """
        return x, dim


_collective_p = Primitive("meshlib_collective")


def bind(
    collective: InJit,
    x: jax.Array,
    site: CallSite | None = None,
    anchors: Sequence[jax.Array] = (),
) -> jax.Array:
    """Make ``collective`` part of the program that is being traced (or make it now).

    Reports name ``site``, by default the nearest user's line on the stack. The call also depends on
    the ``anchors`` (see ``InJit.anchored``); their values do not matter.
    """
    return _collective_p.bind(x, *anchors, collective=collective, site=site or CallSite.of_caller())


def host_struct(x: jax.ShapeDtypeStruct, has_rows: bool) -> jax.ShapeDtypeStruct:
    """Return the shape in which arrays like ``x`` go to the host, (n,) or (rows, n); the dtype."""
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
    # Free: the elements stay where they are.
    flat = x.reshape(host_struct(operand, collective.operand_has_rows).shape)
    operands = [] if collective.is_template else [flat]
    out = host_call(
        function if site is None else site.name(function),
        [] if collective.only_sends else [host_struct(result, collective.result_has_rows)],
        *operands,
        # Nobody reads them; but the call is made when they are there, not before.
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
        # Zero, and yet an outer transformation sees on what the tangent depends.
        t = t + jnp.where(False, other.sum(), 0).astype(t.dtype)
    return y, bind(collective.differential(), t, site, [x.reshape(-1)[:1], *anchors])


def _transpose(cotangent: Any, x: Any, *anchors: Any, collective: InJit, site: CallSite) -> Any:
    del x
    transposed = collective.transposed()
    assert transposed is not None, "only the linear ones appear in tangents"
    # Also where nothing depends on the result: the other ranks' results may matter to them.
    cotangent = ad.instantiate_zeros(cotangent)
    return [bind(transposed, cotangent, site, anchors), *[None] * len(anchors)]


def _batch(
    operands: Any, dims: Any, *, collective: InJit, site: CallSite
) -> tuple[jax.Array, int | None]:
    (x, *anchors), (dim, *others) = operands, dims
    if dim is None and collective.anchored:  # only what it depends on varies: one call for all
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
    # Its line is on the stack, and one compiled program serves for all lines.
    del site, anchors
    return _program_of_one(x, collective=collective)


_program_of_one = jax.jit(_compiled, static_argnames="collective")
_collective_p.def_impl(_run)
_collective_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[_collective_p] = _jvp
ad.primitive_transposes[_collective_p] = _transpose
batching.primitive_batchers[_collective_p] = _batch
mlir.register_lowering(_collective_p, mlir.lower_fun(_compiled, multiple_results=False))
