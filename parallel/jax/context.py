"""Attention over a sequence that is split over ranks, inside ``jax.jit``.

As ``parallel.context`` has it for modules, with the same places for each rank
(``parallel.context.sequence_positions``). Arrays are (batch, length, heads, head_dim), keys and
values may have fewer heads. All ranks have losses of their own over their places: gradients are to
be averaged over ``mesh`` as over data-parallel ranks.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from meshlib import DeviceMesh, ProcessGroup, get_rank, get_world_size, jit
from parallel.context.ring import Block, block_of
from parallel.core.attention.places import half_of

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

    ``k`` and ``v`` go round the ranks of ``mesh`` in n - 1 messages, and round again, with their
    gradients, in the derivative; the keys of all ranks are never in one place. With ``causal``,
    query i attends to the keys up to i; ``zigzag`` says which places each rank has. Liu et al.,
    "Ring Attention", arXiv:2310.01889. Reverse-mode derivatives of the first order only.

    Raises ValueError, while being traced, for shapes that do not fit together, and for an odd
    length and a zig-zag.
    """
    _check(q, k, v)
    if zigzag:
        half_of(q.shape[1], get_world_size(mesh))
    return _ring(q, k, v, (mesh, causal, zigzag))


def ulysses_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mesh: Group, *, causal: bool = True
) -> jax.Array:
    """Return this rank's places of softmax(q @ k.T / sqrt(head_dim)) @ v over whole sequences.

    An all-to-all over ``mesh`` gives each rank the whole sequence of 1/n of the heads, another one
    takes the results back. ``q``, ``k`` and ``v`` are this rank's places, in a row. With
    ``causal``, query i attends to the keys up to i. Jacobs et al., "DeepSpeed Ulysses",
    arXiv:2309.14509.

    Raises ValueError, while being traced, for shapes that do not fit together, and for heads that
    do not divide by the number of ranks.
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

    # JAX's own attention has its softmax in float32, whatever it is given.
    out, _ = _attend(cross(q, 2, 1), cross(k, 2, 1), cross(v, 2, 1), causal)
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


_KEYS, _GRADIENTS = 0, 1  # tags: what one rank sends the next in a step
_Over = tuple[Group, bool, bool]  # the ranks, causal, zigzag


def _ring_of(q: jax.Array, k: jax.Array, v: jax.Array, over: _Over) -> jax.Array:
    return _ring_forward(q, k, v, over)[0]


_rule: Any = jax.custom_vjp(_ring_of, nondiff_argnums=(3,))
_ring: jax.custom_vjp[jax.Array] = _rule


def _ring_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, over: _Over
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    size = get_world_size(over[0])
    held, out, logs = jnp.stack([k, v]), q, q
    for step in range(size):
        passing = None
        if step + 1 < size:
            passing = _pass_on(held, over, _KEYS)
            held = passing.x
        block = _block(step, q, over)
        if block is not None:
            rows, keys, causal = block
            part = _attend(q[:, rows], held[0][:, keys], held[1][:, keys], causal)
            if step == 0:
                out, logs = part
            else:
                own = logs[:, rows]
                together = jnp.logaddexp(own, part[1])
                merged = out[:, rows] * jnp.exp(own - together)
                merged += part[0] * jnp.exp(part[1] - together)
                out, logs = out.at[:, rows].set(merged), logs.at[:, rows].set(together)
        if passing is not None:
            held = jit.permute_done(passing, after=(out, logs))
    return out.astype(q.dtype), (q, k, v, out, logs)


def _ring_backward(
    over: _Over, saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, logs = saved
    along = (out * grad).sum(axis=-1, keepdims=True)
    size = get_world_size(over[0])
    if size == 1:
        q_grad, own = _attend_backward(q, k, v, grad, along, logs, over[1])
        return q_grad.astype(q.dtype), own[0].astype(k.dtype), own[1].astype(v.dtype)
    keys_coming = _pass_on(jnp.stack([k, v]), over, _KEYS)
    held = keys_coming.x
    q_grad, own = part = _attend_backward(q, held[0], held[1], grad, along, logs, over[1])
    # What others add to the gradients of these keys comes with the last step.
    travelling, coming = jnp.zeros_like(own), None
    for step in range(1, size):
        held = jit.permute_done(keys_coming, after=part)
        if step + 1 < size:
            keys_coming = _pass_on(held, over, _KEYS)
            held = keys_coming.x
        block = _block(step, q, over)
        if block is not None:
            rows, keys, causal = block
            part = _attend_backward(
                q[:, rows],
                held[0][:, keys],
                held[1][:, keys],
                grad[:, rows],
                along[:, rows],
                logs[:, rows],
                causal,
            )
            q_grad = q_grad.at[:, rows].add(part[0])
        if coming is not None:
            # They were with the rank before, which is done with them.
            travelling = jit.permute_done(coming, after=part)
        if block is not None:
            travelling = travelling.at[:, :, block.keys].add(part[1])
        coming = _pass_on(travelling, over, _GRADIENTS)
    assert coming is not None
    own = own + jit.permute_done(coming)
    return q_grad.astype(q.dtype), own[0].astype(k.dtype), own[1].astype(v.dtype)


_ring.defvjp(_ring_forward, _ring_backward)


def _pass_on(x: jax.Array, over: _Over, tag: int) -> jit.Passing:
    """Begin to send ``x`` to the next rank, and to receive that of the one before."""
    size = get_world_size(over[0])
    perm = [(rank, (rank + 1) % size) for rank in range(size)]
    return jit.permute_start(x, perm, over[0], tag=tag)


def _block(step: int, q: jax.Array, over: _Over) -> Block | None:
    mesh, causal, zigzag = over
    rank, size = get_rank(mesh), get_world_size(mesh)
    return block_of(rank, (rank - step) % size, q.shape[1] // 2, causal, zigzag)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> tuple[jax.Array, jax.Array]:
    """Return the result for these keys, and the logarithms, (batch, length, heads, 1)."""
    scores = _scores(q, k, causal)
    logs = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    out = jnp.einsum("bkgqt,btkd->bqkgd", jnp.exp(scores - logs), v)
    return out.reshape(q.shape), jnp.moveaxis(logs, 3, 1).reshape(*q.shape[:3], 1)


def _attend_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    along: jax.Array,
    logs: jax.Array,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of ``q``, and those of ``k`` and ``v`` stacked."""

    def by_head(x: jax.Array) -> jax.Array:  # (batch, length, heads, n) as scores have them
        return jnp.moveaxis(x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[3]), 1, 3)

    weights = jnp.exp(_scores(q, k, causal) - by_head(logs))
    grads = by_head(grad.astype(weights.dtype))
    of_v = jnp.einsum("bkgqt,bkgqd->btkd", weights, grads)
    of_scores = weights * (jnp.einsum("bkgqd,btkd->bkgqt", grads, v) - by_head(along))
    of_scores *= 1 / math.sqrt(q.shape[-1])
    of_q = jnp.einsum("bkgqt,btkd->bqkgd", of_scores, k).reshape(q.shape)
    of_k = jnp.einsum("bkgqt,bkgqd->btkd", of_scores, by_head(q))
    return of_q, jnp.stack([of_k, of_v])


def _scores(q: jax.Array, k: jax.Array, causal: bool) -> jax.Array:
    """Return the scores, (batch, kv_heads, heads / kv_heads, queries, keys), float32 or wider."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bqkgd,btkd->bkgqt", grouped, k, preferred_element_type=wide)
    scores *= 1 / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    rows, columns = (jnp.arange(length) for length in scores.shape[-2:])
    return jnp.where(columns <= rows[:, None], scores, -jnp.inf)
