"""Mixtures of experts inside ``jax.jit``, whose experts are split over ``mesh["ep"]``.

    weights, chosen, shares = route(x, params["router"], top_k=2)
    y = mixture(networks, x, weights, chosen, 8, mesh["ep"])

    def networks(rows, counts):                            # this rank's experts
        hidden = jax.nn.gelu(grouped_matmul(rows, params["up"], counts))
        return grouped_matmul(hidden, params["down"], counts)

Rank i of ``ep`` has its own tokens and the i-th of equal parts of the experts. Uneven all-to-alls
send rows to their experts and back, without padding on the wire. XLA needs fixed shapes, so each
rank has memory for all rows that may arrive: without a capacity,
``size * tokens * min(top_k, experts / size)``. All ranks must have the same number of tokens.

A *row* is one choice of one token, numbered choice * tokens + token. First choices precede second
choices, so an expert of limited capacity accepts them first.

Everything but the experts is replicated over ``ep``: average these gradients over ``ep`` and the
data-parallel dims. The gradients of experts already sum the tokens of all ranks of ``ep``: divide
them by its size, and average over the data-parallel dims. Supports first-order reverse-mode
derivatives only, and no ``vmap``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from meshlib import get_world_size, jit
from meshlib.extend import derived_group
from meshlib.extend.jit import host_call
from parallel._groups import GroupLike, resolve

Score = Literal["softmax", "sigmoid"]


class Routes(NamedTuple):
    """The routes of tokens: see ``route``."""

    weights: jax.Array
    """The weights of the choices, (tokens, top_k), highest first."""
    chosen: jax.Array
    """The chosen experts, integers, (tokens, top_k)."""
    shares: jax.Array
    """The router's share for each expert of each token, (tokens, experts); rows sum to 1."""


def route(
    x: jax.Array,
    weight: jax.Array,
    top_k: int,
    *,
    score: Score = "softmax",
    normalize: bool | None = None,
) -> Routes:
    """Return the experts for the tokens x, (tokens, dim); ``weight`` is (dim, experts).

    Scores are the softmax of ``x @ weight`` (Shazeer et al., arXiv:1701.06538; GShard, Switch,
    Mixtral) or its ``"sigmoid"`` (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Among equal scores
    the first expert wins, so ranks with the same tokens choose the same experts. ``normalize``
    divides the weights of the chosen experts by their sum; None: if top_k > 1.

    Raises ValueError, at trace time, for an unknown score or more choices than experts.
    """
    experts = weight.shape[-1]
    if score not in get_args(Score):
        raise ValueError(f"score must be 'softmax' or 'sigmoid', got {score!r}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; expected 1 to the number of experts, {experts}")
    logits = x @ weight
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    weights, chosen = jax.lax.top_k(scores, top_k)
    if top_k > 1 if normalize is None else normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return Routes(weights, chosen, scores / scores.sum(axis=-1, keepdims=True))


def balance_loss(routes: Routes, mesh: GroupLike | None = None) -> jax.Array:
    """Return this rank's share of ``n * sum_e(f_e * P_e)`` over the tokens of all ranks.

    f_e is the fraction of choices of expert e of n, over all ranks of ``mesh`` (None: on this rank
    only). P_e is the mean over this rank's tokens of the router's share for e. The average over
    ranks with the same number of tokens is the loss of all tokens. The loss is 1 if all experts are
    equally busy, and n if one expert gets all tokens. The gradient passes through P_e only.

    Lepikhin et al., "GShard", arXiv:2006.16668, section 2.2; Fedus et al., "Switch Transformers",
    arXiv:2101.03961, equation 4.
    """
    experts = routes.shares.shape[-1]
    counts = (routes.chosen[..., None] == jnp.arange(experts)).sum(axis=(0, 1))
    if mesh is not None:
        counts = jit.all_reduce(counts, group=mesh.process_group)
    fractions = counts / counts.sum().clip(1)
    return experts * (fractions.astype(routes.shares.dtype) * routes.shares.mean(axis=0)).sum()


def with_loss(y: jax.Array, loss: jax.Array) -> jax.Array:
    """Return ``y``, and add the gradients of the scalar ``loss`` in the backward pass.

    Gradients are as if ``loss`` were added to the model's loss. A layer in any stage of a pipeline
    can thus have a balance loss without its callers.
    """
    return _with_loss(y, loss)


@jax.custom_vjp
def _with_loss(y: jax.Array, loss: jax.Array) -> jax.Array:
    del loss
    return y


def _with_loss_forward(y: jax.Array, loss: jax.Array) -> tuple[jax.Array, jax.Array]:
    return y, jnp.ones_like(loss)


def _with_loss_backward(one: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    return grad, one


_with_loss.defvjp(_with_loss_forward, _with_loss_backward)


def mixture(
    networks: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    experts: int,
    mesh: GroupLike | None = None,
    *,
    capacity_factor: float | None = None,
) -> jax.Array:
    """Return the sum of weight_e * e(x) over each token's chosen experts e, (tokens, dim).

    Args:
        networks: ``networks(rows, counts)`` returns a result for each of the rows, (n, dim). These
            are sorted by expert, ``counts[i]`` of them for this rank's i-th expert. They are
            padded with zeros, whose results are ignored.
        x: This rank's tokens, (tokens, dim).
        weights: The weights of the choices, (tokens, top_k).
        chosen: The chosen experts, (tokens, top_k).
        experts: The number of experts on all ranks.
        mesh: The ranks of the experts: ``mesh["ep"]``. None: this rank has all experts.
        capacity_factor: Each expert accepts at most ``ceil(capacity_factor * top_k * tokens /
            experts)`` rows of a rank; further rows count as zero. None: no row is dropped.

    Raises ValueError, at trace time, for shapes that do not fit, or a number of experts that is
    not divisible by the number of ranks.
    """
    x, weights, chosen = jnp.asarray(x), jnp.asarray(weights), jnp.asarray(chosen)
    size = 1 if mesh is None else get_world_size(mesh.process_group)
    tokens, top_k = chosen.shape
    if x.ndim != 2 or len(x) != tokens or weights.shape != chosen.shape:
        raise ValueError(
            f"x, weights and chosen have shapes {x.shape}, {weights.shape}, {chosen.shape};"
            " expected (tokens, dim), (tokens, top_k) and (tokens, top_k)"
        )
    here, rest = divmod(experts, size)
    if rest:
        raise ValueError(f"experts is {experts}, which is not divisible by the {size} ranks")
    capacity = None
    if capacity_factor is not None:
        capacity = math.ceil(capacity_factor * top_k * tokens / experts)
    rows, counts = rows_by_expert(chosen, experts, capacity)
    sent = jnp.where((jnp.arange(len(rows)) < counts.sum())[:, None], x[rows % tokens], 0)
    back: jax.Array
    if mesh is None or size == 1:
        back = networks(sent, counts)
    else:
        outgoing = counts.reshape(size, here).astype(jnp.int32)
        incoming = jit.all_to_all(outgoing, mesh.process_group)
        room = tokens * min(top_k, here)
        room = size * (room if capacity is None else min(room, here * capacity))
        out_of, into = outgoing.sum(axis=1), incoming.sum(axis=1)
        arrived: jax.Array = exchange(sent, out_of, into, mesh, room)
        order = order_of_arrivals(incoming, room)
        of_experts = networks(arrived[order], incoming.sum(axis=0))
        unsorted = jnp.zeros_like(of_experts).at[order].set(of_experts)
        back = exchange(unsorted, into, out_of, mesh, len(rows))
    # Dropped rows must be zero, even if a network's result for zeros is not.
    back = jnp.where((jnp.arange(len(rows)) < counts.sum())[:, None], back, 0)
    terms = jnp.zeros_like(back).at[rows].set(back).reshape(top_k, tokens, -1)
    # The order of the sum must not depend on where the experts are.
    y = terms[0] * weights[:, :1]
    for choice in range(1, top_k):
        y += terms[choice] * weights[:, choice : choice + 1]
    return y


def rows_by_expert(
    chosen: jax.Array, experts: int, capacity: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return the rows of ``chosen``, (tokens, top_k), sorted by expert, and each expert's count.

    The result has all (tokens * top_k,) rows; those beyond an expert's ``capacity`` are last.
    """
    flat = chosen.T.reshape(-1)
    rows = jnp.argsort(flat)
    begins = jnp.searchsorted(flat[rows], jnp.arange(experts + 1))
    counts = begins[1:] - begins[:-1]
    if capacity is not None:
        place = jnp.arange(len(flat)) - begins[flat[rows]]
        rows, counts = rows[jnp.argsort(place >= capacity)], jnp.minimum(counts, capacity)
    return rows, counts


def order_of_arrivals(incoming: jax.Array, room: int) -> jax.Array:
    """Return the permutation that sorts received rows, which are in order of rank, by expert.

    ``incoming``, (ranks, local experts), has the numbers of received rows. The empty ones of the
    ``room`` rows are last.
    """
    here = incoming.shape[1]
    source = jnp.searchsorted(jnp.cumsum(incoming.reshape(-1)), jnp.arange(room), side="right")
    return jnp.argsort(jnp.where(source < incoming.size, source % here, here))


def grouped_matmul(rows: jax.Array, weight: jax.Array, counts: jax.Array) -> jax.Array:
    """Return (n, out): the ``counts[i]`` rows of expert i, of (n, in), times ``weight[i]``.

    ``weight`` is (experts, in, out). Rows after those of the experts become zeros.
    """
    return jax.lax.ragged_dot(rows, weight, counts.astype(jnp.int32))


def exchange(
    rows: jax.Array, out_of: jax.Array, into: jax.Array, mesh: GroupLike | None, room: int
) -> jax.Array:
    """Send ``out_of[i]`` rows to rank i of ``mesh``; return the received rows, ``into[i]`` from i.

    An all-to-all with sizes that are only known when the program runs. The rows to rank 0 are
    first, then those to rank 1; the received rows are in the order of ranks as well, padded with
    zeros to ``room`` rows. The derivative is the opposite exchange.

    Args:
        rows: (n, dim); rows beyond the sum of ``out_of`` are not sent.
        out_of: Integers, (ranks,).
        into: Integers, (ranks,): rank i's ``out_of`` for this rank.
        mesh: The ranks: ``mesh["ep"]``, a process group, or None for the default group.
        room: The number of rows in the result.

    If more than ``room`` rows arrive, the running program fails with the text of a ValueError.
    """
    return _exchange(rows, out_of, into, mesh, room)


def _exchanged(
    rows: jax.Array, out_of: jax.Array, into: jax.Array, mesh: GroupLike | None, room: int
) -> jax.Array:
    base = resolve(mesh, "mesh")
    group = derived_group(base, "rows in jit", f"{base.group_desc or base.id} in jit, rows")

    def move(outputs: Sequence[Any], inputs: Sequence[Any], _: object) -> None:
        (result,), (own, outgoing, incoming) = outputs, inputs
        sizes, splits = incoming.tolist(), outgoing.tolist()
        received = sum(sizes)
        if received > len(result) or sum(splits) > len(own):
            raise ValueError(
                f"{group}: {received} rows to receive and {sum(splits)} to send; expected at most"
                f" {len(result)} and {len(own)}"
            )
        group.all_to_all_single(result[:received], own[: sum(splits)], sizes, splits)
        result[received:] = 0

    spec = jax.ShapeDtypeStruct((room, *rows.shape[1:]), rows.dtype)
    counts = (out_of.astype(np.int32), into.astype(np.int32))
    return host_call(move, [spec], rows, *counts, ordered=True, group=group)[0]


_exchange: Any = jax.custom_vjp(_exchanged, nondiff_argnums=(3, 4))


def _exchange_forward(
    rows: jax.Array, out_of: jax.Array, into: jax.Array, mesh: GroupLike | None, room: int
) -> tuple[jax.Array, tuple[Any, ...]]:
    return _exchanged(rows, out_of, into, mesh, room), (out_of, into, jnp.zeros((len(rows), 0)))


def _exchange_backward(
    mesh: GroupLike | None, room: int, saved: tuple[Any, ...], grad: jax.Array
) -> tuple[Any, ...]:
    out_of, into, rows = saved
    return _exchange(grad, into, out_of, mesh, len(rows)), None, None


_exchange.defvjp(_exchange_forward, _exchange_backward)
