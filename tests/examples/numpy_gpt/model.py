"""The model: the parts of a transformer, and which of them are a stage."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from numpy_gpt.config import Config, Model
from numpy_gpt.dims import Dims
from parallel import nn
from parallel.expert import MoE
from parallel.pipeline import StageLayers


class Block(nn.Module):
    """Attention, and a feed-forward network or a mixture of experts, each after a norm."""

    def __init__(self, attention: nn.Module, feed: nn.Module, width: int, dtype: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, dtype=dtype)
        self.attention = attention
        self.feed_norm = nn.RMSNorm(width, dtype=dtype)
        self.feed = feed

    def forward(self, x: Any) -> Any:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))

    def backward(self, grad: Any) -> Any:
        """Map the output's gradient to the input's."""
        grad = grad + self.feed_norm.backward(self.feed.backward(grad))
        return grad + self.attention_norm.backward(self.attention.backward(grad))


def names_of(model: Model, stages: int) -> list[list[str]]:
    """Return the names of the parts of each stage: equally many blocks, the first some more.

    The embedding is the first one's, the last norm and the head are the last one's.
    """
    blocks = [f"blocks.{i}" for i in range(model.layers)]
    ends = [-(-model.layers * i // stages) for i in range(stages + 1)]
    names = [blocks[begin:end] for begin, end in itertools.pairwise(ends)]
    names[0].insert(0, "embedding")
    names[-1] += ["norm", "head"]
    return names


def make_stage(config: Config, names: list[str], dims: Dims) -> StageLayers:
    """Return a stage: the named parts, whole except for experts, of which there are this rank's.

    Each part is drawn with a generator of its own, so that any stage begins as in the whole model.
    """
    model, dtype = config.model, config.precision.dtype
    parts: dict[str, nn.Module] = {}
    for name in names:
        kind, _, number = name.partition(".")
        index = int(number or 0)
        rng = np.random.default_rng([config.run.seed, len(kind), index])
        if kind == "embedding":
            parts[name] = nn.Embedding(model.vocabulary, model.width, rng=rng, dtype=dtype)
        elif kind == "blocks":
            parts[name] = make_block(config, index, rng, dims)
        elif kind == "norm":
            parts[name] = nn.RMSNorm(model.width, dtype=dtype)
        else:
            parts[name] = nn.Linear(model.width, model.vocabulary, False, rng=rng, dtype=dtype)
    return StageLayers(list(parts.items()))


def make_block(config: Config, index: int, rng: np.random.Generator, dims: Dims) -> Block:
    """Return one block; each second one has a mixture of experts, if there are any."""
    model, dtype = config.model, config.precision.dtype
    attention = nn.MultiHeadAttention(
        model.width, model.heads, model.kv_heads, rng=rng, dtype=dtype
    )
    if not model.has_experts(index):
        feed: nn.Module = make_feed_forward(model.width, model.hidden, rng, dtype)
    else:
        shared = None
        if model.shared_hidden:
            shared = make_feed_forward(model.width, model.shared_hidden, rng, dtype)
        feed = MoE(
            model.width,
            model.expert_hidden,
            model.experts,
            model.top_k,
            ep=dims.ep,
            tp=dims.tp,
            # Gradients of microbatches are added up: of the loss, each counts as its share.
            balance_weight=model.balance_weight / config.data.microbatches,
            balance_over=dims.tokens,
            shared=shared,
            rng=rng,
            dtype=dtype,
        )
    return Block(attention, feed, model.width, dtype)


def make_feed_forward(
    width: int, hidden: int, rng: np.random.Generator, dtype: str
) -> nn.Sequential:
    """Return two layers with a GELU between them."""
    return nn.Sequential(
        nn.Linear(width, hidden, False, rng=rng, dtype=dtype),
        nn.GELU(),
        nn.Linear(hidden, width, False, rng=rng, dtype=dtype),
    )
