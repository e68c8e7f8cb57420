"""All uses of JAX's private modules by ``meshlib.jit``.

These modules may change with any version of JAX. Tests cover the versions from
``host_calls.OLDEST`` to below ``host_calls.BEYOND``. The first call imports this file
(``host_calls.internals``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax._src import config, core, dispatch, effects
from jax._src.interpreters import mlir, pxla
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import Primitive


class _CallEffect(effects.Effect):
    """The effect that keeps a call from being dropped, and orders it if it is ordered."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


class _OrderedCallEffect(_CallEffect):
    pass


ORDERED = _OrderedCallEffect("OrderedMeshCall")
UNORDERED = _CallEffect("MeshCall")

effects.ordered_effects.add_type(_OrderedCallEffect)
# Without this, JAX refuses programs over several devices, with a less helpful error than ours.
effects.shardable_ordered_effects.add_type(_OrderedCallEffect)
for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
    # Other ranks wait in a call for this one, even if this one does not use its result.
    effects.partial_eval_kept_effects,
):
    _allowed.add_type(_CallEffect)


def are_ours(all_effects: Iterable[object]) -> bool:
    """Return whether all effects of a program come from calls."""
    return all(isinstance(effect, _CallEffect) for effect in all_effects)


def is_top_level() -> bool:
    """Return whether the calling thread is outside of all JAX transformations."""
    return core.trace_ctx.is_top_level()


def traces_are_own() -> bool:
    """Return whether ``jax.jit`` separates this thread's traces (see ``meshlib.testing``)."""
    return bool(config.xla_metadata_context_manager.value)


def run_alone(primitive: Primitive) -> None:
    """Make JAX run ``primitive`` as a program of its own outside of tracing."""
    dispatch.simple_impl(primitive)


def shaped(struct: jax.ShapeDtypeStruct) -> Any:
    """Return the abstract value of an array like ``struct`` in traces."""
    return core.ShapedArray(struct.shape, struct.dtype)


def lower_ordered(ctx: Any, rule: Callable[..., Any], operands: Iterable[Any], **given: Any) -> Any:
    """Lower a custom call by ``rule``, with a token from the previous call to the next."""
    around = ctx.replace(
        avals_in=[core.abstract_token, *ctx.avals_in],
        avals_out=[core.abstract_token, *ctx.avals_out],
    )
    token, *outputs = rule(around, ctx.tokens_in.get(ORDERED), *operands, **given)
    ctx.set_tokens_out(mlir.TokenSet({ORDERED: token}))
    return outputs


def with_first_token(ctx: Any) -> Any:
    """Return a copy of ``ctx`` in which ordered calls begin with a new token."""
    return ctx.replace(tokens_in=mlir.TokenSet({ORDERED: hlo.create_token()}), tokens_out=None)


def watch_programs(entered: Callable[[Any], None]) -> None:
    """Make each thread call ``entered(kept)`` before it runs a program that JAX starts from Python.

    ``kept`` holds the objects that the program's modules keep alive. XLA makes calls from its own
    threads, so the starting thread is only known where JAX adds this thread's tokens.
    """
    execute: Any = pxla.ExecuteReplicated
    add_tokens = execute._add_tokens_to_inputs

    def enter_and_add_tokens(program: Any, buffers: Any) -> Any:
        entered(program.keepalive or ())
        return add_tokens(program, buffers)

    execute._add_tokens_to_inputs = enter_and_add_tokens
