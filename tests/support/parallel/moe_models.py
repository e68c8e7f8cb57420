"""Small mixtures of experts, and the loop over all experts that they are compared with."""

import numpy as np

from parallel import nn
from parallel.expert import MoE

DIM, HIDDEN, EXPERTS = 6, 8, 4


def make_moe(*, top_k=2, shared=False, seed=0, experts=EXPERTS, **options):
    rng = np.random.default_rng(seed)
    if shared:
        up, down = nn.Linear(DIM, 5, rng=rng, dtype="f8"), nn.Linear(5, DIM, rng=rng, dtype="f8")
        options["shared"] = nn.Sequential(up, nn.GELU(), down)
    return MoE(DIM, HIDDEN, experts, top_k, rng=rng, dtype="f8", **options)


def tokens(step, rank=0, world=1, count=24):
    """Return this rank's part of a step's tokens; some experts have few of them, or none."""
    x = np.random.default_rng([5, step]).normal(size=(count, DIM))
    x[: count // 2] += 1.5 * x[0]
    return x[rank * count // world : (rank + 1) * count // world]


def dense(layer, x):
    """Return the layer's output by a loop over the experts, each of which sees all tokens."""
    scores = x @ layer.router.weight.data.T
    if layer.router.score == "softmax":
        scores = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-scores))
    chosen = np.zeros(scores.shape, bool)
    for row, values in zip(chosen, scores, strict=True):
        row[np.argsort(-values, kind="stable")[: layer.router.top_k]] = True
    weights = np.where(chosen, scores, 0)
    if layer.router.normalize:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    up, down = layer.experts.up.weight.data, layer.experts.down.weight.data
    y = np.zeros_like(x)
    for e in range(layer.router.experts):
        hidden = nn.GELU().eval()(x @ up[:, e].T)
        y += weights[:, e : e + 1] * (hidden @ down[:, e].T)
    shares = scores / scores.sum(axis=-1, keepdims=True)
    balance = (
        layer.router.experts
        * (chosen.mean(axis=0) / layer.router.top_k * shares.mean(axis=0)).sum()
    )
    return y if layer.shared is None else y + layer.shared.eval()(x), balance
