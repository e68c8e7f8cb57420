"""Mixtures of experts on plain arrays: which experts a token goes to, and the order of its rows.

A *row* is one choice of one token, numbered choice * tokens + token. First choices come before
second ones: an expert of limited capacity takes them first. ``xp`` is the arrays' library;
inside ``jax.jit`` all shapes are known while tracing.
"""

from __future__ import annotations

import math
from typing import Literal

from parallel._arrays import Array, Namespace

Score = Literal["softmax", "sigmoid"]


def scores_of(xp: Namespace, logits: Array, score: Score) -> Array:
    """Return the experts' scores, of the shape of ``logits``, (tokens, experts).

    ``softmax`` (Shazeer et al., arXiv:1701.06538; GShard, Switch, Mixtral) or ``sigmoid``
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """
    if score == "sigmoid":
        return (xp.tanh(logits * 0.5) + 1) * 0.5
    scores = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def choose(xp: Namespace, scores: Array, top_k: int) -> tuple[Array, Array]:
    """Return the ``top_k`` best scores of each token and their experts, the best first.

    Of equal scores the first expert's counts more, so ranks with the same tokens choose alike.
    """
    chosen = _order(xp, -scores)[:, :top_k]
    return xp.take_along_axis(scores, chosen, axis=-1), chosen


def load_balance(counts: Array, shares: Array) -> tuple[Array, Array]:
    """Return the balance loss ``n * sum_e(f_e * P_e)``, and its gradient by ``shares``.

    f_e is the share of all choices that fell on expert e, P_e the mean over the tokens of what the
    router gave it. The loss is 1 where all experts are equally busy, and n where one has all. f_e
    has no derivative: the gradient goes through P_e.

    Lepikhin et al., "GShard", arXiv:2006.16668, section 2.2; Fedus et al., "Switch Transformers",
    arXiv:2101.03961, equation 4.

    Args:
        counts: The number of choices of each of the n experts, (n,), over all ranks whose tokens
            count.
        shares: The router's probabilities of the experts for each token here, (tokens, n); rows sum
            to 1.

    Returns:
        The loss, this rank's share of it: its average over ranks of equally many tokens is the
        loss of all of their tokens. And the gradient, which is the same for each token: (n,).
    """
    tokens, experts = shares.shape
    fractions = (counts / counts.sum().clip(1)).astype(shares.dtype) * (experts / max(tokens, 1))
    return (fractions * shares.sum(axis=0)).sum(), fractions


def capacity_of(factor: float | None, tokens: int, top_k: int, experts: int) -> int | None:
    """Return how many rows an expert takes from a rank of ``tokens`` tokens; None: all."""
    return None if factor is None else math.ceil(factor * top_k * tokens / experts)


def by_expert(
    xp: Namespace, chosen: Array, experts: int, capacity: int | None
) -> tuple[Array, Array]:
    """Return the rows of ``chosen``, (tokens, top_k), by their expert, and how many each takes.

    All rows are there, (tokens * top_k,); those beyond an expert's ``capacity`` come last.
    """
    flat = chosen.T.reshape(-1)
    rows = _order(xp, flat)
    begins = xp.searchsorted(flat[rows], xp.arange(experts + 1))
    counts = begins[1:] - begins[:-1]
    if capacity is not None:
        place = xp.arange(len(flat)) - begins[flat[rows]]
        rows, counts = rows[_order(xp, place >= capacity)], xp.minimum(counts, capacity)
    return rows, counts


def by_arrival(xp: Namespace, incoming: Array, length: int) -> Array:
    """Return the order that sorts arrived rows by expert: they come by rank, then by expert.

    ``incoming``, (ranks, experts here), says how many come. There is room for ``length`` rows; the
    empty places come last.
    """
    here = incoming.shape[1]
    source = xp.searchsorted(xp.cumsum(incoming.reshape(-1)), xp.arange(length), side="right")
    return _order(xp, xp.where(source < incoming.size, source % here, here))


def _order(xp: Namespace, keys: Array) -> Array:
    """Return the stable order of ``keys`` along the last dim."""
    # JAX's is stable, and knows no kinds.
    return xp.argsort(keys) if hasattr(keys, "at") else xp.argsort(keys, axis=-1, kind="stable")
