"""Attention over a sequence that is split over ranks, inside ``jax.jit``.

The counterpart of ``parallel.context`` for pytrees. Each rank holds the same places as there
(``parallel.context.sequence_positions``). Arrays are (batch, length, heads, head_dim), keys and
values may have fewer heads. All ranks have losses of their own over their places: gradients are to
be averaged over ``mesh`` as over data-parallel ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshlib import DeviceMesh, ProcessGroup, get_rank, get_world_size, jit
from parallel._core.attention.dot_product import attend
from parallel._core.attention.ring import RingAlgorithm, half_of

Group = ProcessGroup | DeviceMesh | None


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mesh: Group,
    *,
    causal: bool = True,
    zigzag: bool = True,
) -> jax.Array:
    """Return this rank's places of softmax(q @ k.T / sqrt(head_dim)) @ v over whole sequences.

    ``k`` and ``v`` go round the ranks of ``mesh`` in n - 1 messages. The derivative sends them
    round again, with their gradients. No rank ever holds the keys of all. With ``causal``, query i
    attends to the keys up to i. With ``zigzag``, the sequence has 2n chunks, and rank r holds the
    chunks r and 2n - 1 - r; else each rank holds consecutive places. Liu et al., "Ring Attention",
    arXiv:2310.01889. It has first-order reverse-mode derivatives only.

    Raises ValueError, at trace time, for shapes that do not fit together, or an odd length with
    ``zigzag``.
    """
    _check(q, k, v)
    if zigzag:
        half_of(q.shape[1], get_world_size(mesh))
    return _ring(q, k, v, (mesh, causal, zigzag))


def ulysses_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mesh: Group, *, causal: bool = True
) -> jax.Array:
    """Return this rank's places of softmax(q @ k.T / sqrt(head_dim)) @ v over whole sequences.

    An all-to-all over ``mesh`` gives each rank the whole sequence of 1/n of the heads; a second
    one returns the results. ``q``, ``k`` and ``v`` hold this rank's consecutive places of the
    sequence. With ``causal``, query i attends to the keys up to i. Jacobs et al., "DeepSpeed
    Ulysses", arXiv:2309.14509.

    Raises ValueError, at trace time, for shapes that do not fit together, or a number of heads
    that the number of ranks does not divide.
    """
    _check(q, k, v)
    size = get_world_size(mesh)
    for name, x in (("q", q), ("k", k)):
        if x.shape[2] % size:
            raise ValueError(
                f"{name} has {x.shape[2]} heads, which do not divide by the {size} ranks of {mesh}:"
                " an all-to-all gives each rank whole heads"
            )

    def cross(x: jax.Array, split: int, concat: int) -> jax.Array:
        return jit.all_to_all(x, mesh, split_axis=split, concat_axis=concat, tiled=True)

    # JAX's own attention computes its softmax in float32, for any input dtype.
    whole = q.shape[1] * size
    out, _ = attend(jnp, *(cross(x, 2, 1) for x in (q, k, v)), causal=causal, rows=whole)
    return cross(out.astype(q.dtype), 1, 2)


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    fits = (
        q.ndim == k.ndim == 4
        and k.shape == v.shape
        and q.shape[:2] == k.shape[:2]
        and q.shape[3] == k.shape[3]
        and q.shape[2] % max(k.shape[2], 1) == 0
    )
    if not fits:
        raise ValueError(
            f"q, k and v have shapes {q.shape}, {k.shape}, {v.shape}; expected (batch, length,"
            " heads, head_dim), k and v alike, and the heads of q a multiple of theirs"
        )


_Over = tuple[Group, bool, bool]  # the ranks, causal, zigzag


def _ring_of(q: jax.Array, k: jax.Array, v: jax.Array, over: _Over) -> jax.Array:
    return _ring_forward(q, k, v, over)[0]


_rule: Any = jax.custom_vjp(_ring_of, nondiff_argnums=(3,))
_ring: jax.custom_vjp[jax.Array] = _rule


def _ring_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, over: _Over
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, logs = _ring_over(over, q.shape[1]).forward(_Permutes(over[0]), q, k, v)
    return out.astype(q.dtype), (q, k, v, out, logs)


def _ring_backward(
    over: _Over, saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, ...]:
    q, k, v, out, logs = saved
    ring = _ring_over(over, grad.shape[1])
    grads = ring.backward(_Permutes(over[0]), q, k, v, out, logs, grad)
    return tuple(one.astype(x.dtype) for one, x in zip(grads, (q, k, v), strict=True))


_ring.defvjp(_ring_forward, _ring_backward)


def _ring_over(over: _Over, length: int) -> RingAlgorithm:
    mesh, causal, zigzag = over
    return RingAlgorithm(jnp, get_rank(mesh), get_world_size(mesh), causal, zigzag, rows=length)


class _Permutes(NamedTuple):
    """Passes arrays on to the next rank while XLA computes."""

    mesh: Group

    def start(self, x: jax.Array, tag: int) -> _Permuted:
        size = get_world_size(self.mesh)
        perm = [(rank, (rank + 1) % size) for rank in range(size)]
        return _Permuted(jit.permute_start(x, perm, self.mesh, tag=tag))


class _Permuted(NamedTuple):
    passing: jit.PendingPermute

    @property
    def x(self) -> jax.Array:
        return self.passing.x

    def done(self, after: Any) -> jax.Array:
        return jit.permute_done(self.passing, after)
