"""Crossing between whole activations and ones that are split over ranks, inside ``jax.jit``.

The conjugate operators of Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: f enters a
region in which each rank of ``mesh["tp"]`` works on its part of a layer, g leaves it. A column
parallel matrix, an element-wise function and a row parallel matrix between the two cost one
all-reduce forward (in g) and one backward (in f)::

    h = jax.nn.gelu(copy_to_region(x, tp) @ w_in)      # w_in: this rank's columns
    y = reduce_from_region(h @ w_out, tp)              # w_out: this rank's rows

With ``axis=1``, activations outside of the region are split along the sequence, and each of the two
is an all-gather one way and a reduce-scatter the other (Korthikanti et al., arXiv:2205.05198,
section 4.2.2)::

    x = rms_norm(x, copy_to_region(scale, tp))         # its gradient is summed over the ranks
    h = jax.nn.gelu(copy_to_region(x, tp, axis=1) @ w_in)
    y = reduce_from_region(h @ w_out, tp, axis=1)

Outside of such regions all ranks of the dimension compute the same, or their part of the sequence,
and each gets the whole gradient of what it holds: nothing is left to be reduced over ``tp``.
(``meshlib.jit.all_reduce`` is the other convention, in which ranks have losses of their own, and
their sum is meant.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshlib import DeviceMesh, ProcessGroup, ReduceOp, get_rank, get_world_size, jit

Group = ProcessGroup | DeviceMesh | None


_Crossing = Callable[[jax.Array, Group, Any], jax.Array]


def _with_derivative(back: _Crossing) -> Callable[[_Crossing], jax.custom_vjp[jax.Array]]:
    """Make a function an operator whose gradient is ``back`` of the result's."""

    def decorate(function: _Crossing) -> jax.custom_vjp[jax.Array]:
        def forward(x: jax.Array, mesh: Group, axis: int | None) -> tuple[jax.Array, None]:
            return function(x, mesh, axis), None

        def backward(mesh: Group, axis: int | None, _: None, grad: jax.Array) -> tuple[jax.Array]:
            return (back(grad, mesh, axis),)

        rule: Any = jax.custom_vjp(function, nondiff_argnums=(1, 2))
        rule.defvjp(forward, backward)
        return rule

    return decorate


def _gather(x: jax.Array, mesh: Group, axis: int | None) -> jax.Array:
    """Return all of what ``x`` is this rank's part of along ``axis``; None: it is all."""
    return x if axis is None else jit.all_gather(x, mesh, axis=axis, tiled=True)


def _sum(x: jax.Array, mesh: Group, axis: int | None) -> jax.Array:
    """Return the sum of ``x`` over ``mesh``, or this rank's part of it along ``axis``."""
    if axis is None:
        return jit.all_reduce(x, group=mesh)
    _part_size(x, mesh, axis)
    return jit.reduce_scatter(x, group=mesh, axis=axis, tiled=True)


def _own_part(x: jax.Array, mesh: Group, axis: int) -> jax.Array:
    width, rank = _part_size(x, mesh, axis), get_rank(mesh)
    return jax.lax.slice_in_dim(x, rank * width, (rank + 1) * width, axis=axis)


@_with_derivative(_sum)
def copy_to_region(x: jax.Array, mesh: Group, axis: int | None = None) -> jax.Array:
    """f: return ``x``, the same on all ranks; its gradient is summed over ``mesh``.

    With ``axis``, ``x`` is this rank's part along it: the ranks' parts are gathered, and the sum of
    the gradient is scattered again.
    """
    return _gather(x, mesh, axis)


@_with_derivative(_gather)
def reduce_from_region(x: jax.Array, mesh: Group, axis: int | None = None) -> jax.Array:
    """g: return the sum of ``x`` over ``mesh``; its gradient passes as it is.

    With ``axis``, return this rank's part of the sum along it; the gradient's parts are gathered.
    Raises ValueError when that dim does not divide by the number of ranks.
    """
    return _sum(x, mesh, axis)


@_with_derivative(_own_part)
def gather_from_region(x: jax.Array, mesh: Group, axis: int = -1) -> jax.Array:
    """Return the ranks' ``x`` side by side along ``axis``, the same on all ranks.

    The gradient, which is the same on all ranks, is split again.
    """
    return _gather(x, mesh, axis)


@_with_derivative(_gather)
def scatter_to_region(x: jax.Array, mesh: Group, axis: int = -1) -> jax.Array:
    """Return this rank's part along ``axis`` of ``x``, the same on all ranks of ``mesh``.

    The gradient is gathered. Raises ValueError when that dim does not divide by the number of
    ranks.
    """
    return _own_part(x, mesh, axis)


def vocab_parallel_embedding(
    table: jax.Array, indices: jax.Array, mesh: Group, axis: int | None = None
) -> jax.Array:
    """Return the vectors of ``indices``, of which ``table`` has this rank's block of rows.

    ``table`` is (num_embeddings / size, embedding_dim), ``indices`` are integers of any shape, the
    same on all ranks of ``mesh``, each in [0, num_embeddings). With ``axis``, this rank's part
    along it is returned.
    """
    local = indices - get_rank(mesh) * table.shape[0]
    own = (local >= 0) & (local < table.shape[0])
    vectors = table[jnp.where(own, local, 0)]
    return reduce_from_region(jnp.where(own[..., None], vectors, 0), mesh, axis)


def vocab_parallel_cross_entropy(logits: jax.Array, targets: jax.Array, mesh: Group) -> jax.Array:
    """Return the cross-entropy of each sample, the same on all ranks of ``mesh``.

    ``logits`` are (..., classes / size), this rank's block of classes; ``targets`` integers (...)
    in [0, classes), the same on all ranks. Logits are not gathered: two all-reduces, of one number
    a sample and of two, do. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
    """
    own = logits.shape[-1]
    largest = jax.lax.stop_gradient(logits).max(axis=-1, keepdims=True)
    logits = logits - jit.all_reduce(largest, ReduceOp.MAX, mesh)
    local = targets - get_rank(mesh) * own
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, own - 1)[..., None], axis=-1)[..., 0]
    picked = jnp.where((local >= 0) & (local < own), picked, 0)
    sums: jax.Array = reduce_from_region(jnp.stack([jnp.exp(logits).sum(axis=-1), picked]), mesh)
    return jnp.log(sums[0]) - sums[1]


def _part_size(x: jax.Array, mesh: Group, axis: int) -> int:
    size = get_world_size(mesh)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}; expected {-x.ndim} to {x.ndim - 1}, for {x.shape}")
    width, rest = divmod(x.shape[axis], size)
    if rest:
        which = "last dim" if axis % x.ndim == x.ndim - 1 else f"dim {axis}"
        raise ValueError(
            f"x has shape {x.shape}; its {which} does not divide by the {size} ranks of {mesh}"
        )
    return width
