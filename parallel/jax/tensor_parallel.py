"""Crossing between replicated and sharded activations, inside ``jax.jit``.

The conjugate operators of Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: f enters a
region in which each rank of ``mesh["tp"]`` works on its part of a layer, g leaves it. A column
parallel matrix, an element-wise function and a row parallel matrix between the two cost one
all-reduce forward (in g) and one backward (in f)::

    h = jax.nn.gelu(copy_to_region(x, tp) @ w_in)      # w_in: this rank's columns
    y = reduce_from_region(h @ w_out, tp)              # w_out: this rank's rows

Outside of such regions all ranks of the dimension compute the same, and each gets the whole
gradient of what it holds: nothing is left to be reduced over ``tp``. (``meshlib.jit.all_reduce``
is the other convention, in which ranks have losses of their own, and their sum is meant.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from meshlib import DeviceMesh, ProcessGroup, get_rank, get_world_size, jit

Group = ProcessGroup | DeviceMesh | None


def _crossing(function: Callable[[jax.Array, Group], jax.Array]) -> jax.custom_vjp[jax.Array]:
    rule: Any = jax.custom_vjp(function, nondiff_argnums=(1,))
    return rule


@_crossing
def copy_to_region(x: jax.Array, mesh: Group) -> jax.Array:
    """f: return ``x``, the same on all ranks; its gradient is summed over ``mesh``."""
    return x


def _copy_forward(x: jax.Array, mesh: Group) -> tuple[jax.Array, None]:
    return x, None


def _copy_backward(mesh: Group, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jit.all_reduce(grad, group=mesh),)


copy_to_region.defvjp(_copy_forward, _copy_backward)


@_crossing
def reduce_from_region(x: jax.Array, mesh: Group) -> jax.Array:
    """g: return the sum of ``x`` over ``mesh``; its gradient passes as it is."""
    return jit.all_reduce(x, group=mesh)


def _reduce_forward(x: jax.Array, mesh: Group) -> tuple[jax.Array, None]:
    return jit.all_reduce(x, group=mesh), None


def _reduce_backward(mesh: Group, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (grad,)


reduce_from_region.defvjp(_reduce_forward, _reduce_backward)


@_crossing
def gather_from_region(x: jax.Array, mesh: Group) -> jax.Array:
    """Return the ranks' ``x``, (…, n), side by side: (…, n * size), the same on all ranks.

    The gradient is split again.
    """
    return jit.all_gather(x, mesh, axis=-1, tiled=True)


def _gather_forward(x: jax.Array, mesh: Group) -> tuple[jax.Array, None]:
    return gather_from_region(x, mesh), None


def _gather_backward(mesh: Group, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (_own_part(grad, mesh),)


gather_from_region.defvjp(_gather_forward, _gather_backward)


@_crossing
def scatter_to_region(x: jax.Array, mesh: Group) -> jax.Array:
    """Return this rank's part of ``x``, (…, n), the same on all ranks: (…, n / size).

    The gradient is gathered. Raises ValueError when n does not divide by the number of ranks.
    """
    return _own_part(x, mesh)


def _scatter_forward(x: jax.Array, mesh: Group) -> tuple[jax.Array, None]:
    return scatter_to_region(x, mesh), None


def _scatter_backward(mesh: Group, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jit.all_gather(grad, mesh, axis=-1, tiled=True),)


scatter_to_region.defvjp(_scatter_forward, _scatter_backward)


def _own_part(x: jax.Array, mesh: Group) -> jax.Array:
    size = get_world_size(mesh)
    width, rest = divmod(x.shape[-1], size)
    if rest:
        raise ValueError(
            f"x has shape {x.shape}; its last dim does not divide by the {size} ranks of {mesh}"
        )
    return jax.lax.slice_in_dim(x, get_rank(mesh) * width, (get_rank(mesh) + 1) * width, axis=-1)
