"""The model: the parameters of its parts, and the computation of a stage.

The functions are written for one process: ``parallelize`` and ``fsdp.shard`` replace weights by
nodes that make the calls. The attention runs over cp, and the mixture of experts over ep.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpt_config import Config, Dims

from meshlib.sharding import Replicate, Shard
from parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from parallel.jax import (
    balance_loss,
    copy_to_region,
    fsdp,
    gather_from_region,
    grouped_matmul,
    mixture,
    parallelize,
    reduce_from_region,
    ring_attention,
    route,
    scatter_to_region,
    sequence_positions,
    share_input,
    ulysses_attention,
    with_loss,
)

Tree = dict[str, Any]

# ------------------------------------------------------------------ parameters


def names_of(layers: int, stages: int) -> list[list[str]]:
    """Return the names of each stage's parts; the first stages may have one block more."""
    ends = [-(-layers * i // stages) for i in range(stages + 1)]
    names = [[f"blocks.{i}" for i in range(*pair)] for pair in itertools.pairwise(ends)]
    names[0].insert(0, "embedding")
    names[-1] += ["norm", "head"]
    return names


def make_stage(config: Config, names: list[str], dims: Dims) -> Tree:
    """Return the named parts: this rank's share of each, on all dims but pp."""
    stage: Tree = {"blocks": {}}
    for name in names:
        kind, _, number = name.partition(".")
        # Each part has its own generator, so its values do not depend on the mesh.
        rng = np.random.default_rng([config.run.seed, len(kind), int(number or 0)])
        part = split(draw_part(config, kind, int(number or 0), rng), config, dims)
        if number:
            stage["blocks"][number] = part[kind]
        else:
            stage |= part
    return stage


def draw_part(config: Config, kind: str, index: int, rng: np.random.Generator) -> Tree:
    """Return the whole initial parameters of one part of the model."""
    model = config.model

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=shape[-2] ** -0.5).astype(config.run.dtype)

    width, ones = model.width, np.ones(model.width, config.run.dtype)
    if kind != "blocks":
        shape = {"embedding": (model.vocabulary, width), "head": (width, model.vocabulary)}
        return {kind: ones if kind == "norm" else draw(*shape[kind])}
    kv = width * model.kv_heads // model.heads
    attention = {"q": draw(width, width), "k": draw(width, kv), "v": draw(width, kv)}
    block: Tree = {
        "attention_norm": ones,
        "attention": attention | {"out": draw(width, width)},
        "feed_norm": ones,
    }
    if not model.experts or index % 2 == 0:
        block["feed"] = {"up": draw(width, model.hidden), "down": draw(model.hidden, width)}
    else:
        count, hidden, shared = model.experts, model.expert_hidden, model.shared_hidden
        block["router"] = draw(width, count)
        block["experts"] = {"up": draw(count, width, hidden), "down": draw(count, hidden, width)}
        if shared:
            block["shared"] = {"up": draw(width, shared), "down": draw(shared, width)}
    return {"blocks": block}


def split(part: Tree, config: Config, dims: Dims) -> Tree:
    """Return this rank's share of a whole part, split over tp and ep first, then over dp_shard."""
    outside = Shard(1) if config.parallel.sequence else Replicate()
    columns, rows = ColwiseParallel(outside), RowwiseParallel(output_layouts=outside)
    plan: dict[str, ParallelStyle | Shard] = {
        "embedding": rows,
        "blocks.attention.[qkv]": columns,
        "blocks.attention.out": rows,
        "blocks.feed.up": columns,
        "blocks.feed.down": rows,
        "blocks.shared.up": ColwiseParallel(Replicate()),
        "blocks.shared.down": RowwiseParallel(output_layouts=Replicate()),
        "blocks.experts.up": Shard(2),
        "blocks.experts.down": Shard(1),
        "head": columns,
    }
    if config.parallel.sequence:
        names = ["blocks.attention_norm", "blocks.feed_norm", "norm"]
        plan |= dict.fromkeys(names, SequenceParallel())
    there = set(part) | {f"{kind}.{name}" for kind in part for name in part[kind]}
    here = {path: style for path, style in plan.items() if ".".join(path.split(".")[:2]) in there}
    part = parallelize(part, dims.tp, here)
    experts = part["blocks"].pop("experts", None) if "blocks" in part else None
    part = fsdp.shard(part, dims.dense)
    if experts is not None:
        experts = parallelize(experts, dims.ep, {"up": Shard(0), "down": Shard(0)})
        part["blocks"]["experts"] = fsdp.shard(experts, dims.experts)
    return part


# ------------------------------------------------------------------ functions


def norm(x: jax.Array, scale: Any) -> jax.Array:
    """Return ``x`` with a root mean square of 1 along the last dim, scaled."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotate(x: jax.Array, places: np.ndarray) -> jax.Array:
    """Apply rotary embeddings for positions ``places`` to (batch, length, heads, features)."""
    half = x.shape[-1] // 2
    angles = places[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Stage:
    """The computation of one stage of the pipeline: a function of its parameters and its input."""

    def __init__(self, config: Config, dims: Dims) -> None:
        self.config, self.dims = config, dims
        cp = dims.cp.size()
        self.zigzag = cp > 1 and config.parallel.attention == "ring"
        self.places = sequence_positions(config.model.context // cp, dims.cp, zigzag=self.zigzag)
        """This rank's positions in the sequence."""

    def __call__(self, params: Tree, x: jax.Array) -> jax.Array:
        """Map tokens (batch, length), or activations, to activations or this rank's logits."""
        if "embedding" in params:
            x = fsdp.gather(params["embedding"])[x]
        for name in sorted(params["blocks"], key=int):
            x = fsdp.layer(self.block)(params["blocks"][name], x)
        if "head" in params:
            last = fsdp.gather({name: params[name] for name in ("norm", "head")}, after=x)
            x = norm(x, last["norm"]) @ last["head"]
        return x

    def block(self, params: Tree, x: jax.Array) -> jax.Array:
        """Map (batch, length, width) to the same shape."""
        x = x + self.attend(params["attention"], norm(x, params["attention_norm"]))
        inside = norm(x, params["feed_norm"])
        if "feed" in params:
            return x + jax.nn.gelu(inside @ params["feed"]["up"]) @ params["feed"]["down"]
        return x + self.mix(params, inside)

    def attend(self, params: Tree, x: jax.Array) -> jax.Array:
        """Compute causal self-attention of this rank's heads, over whole sequences of cp."""
        x = share_input(x, params["q"], params["k"], params["v"])
        wide = self.config.model.width // self.config.model.heads
        q, k, v = (x @ params[name] for name in "qkv")
        q, k, v = (y.reshape(*y.shape[:2], -1, wide) for y in (q, k, v))
        q, k = rotate(q, self.places), rotate(k, self.places)
        if self.config.parallel.attention == "ring":
            y = ring_attention(q, k, v, self.dims.cp, zigzag=self.zigzag)
        else:
            y = ulysses_attention(q, k, v, self.dims.cp)
        return y.reshape(*y.shape[:2], -1) @ params["out"]

    def mix(self, params: Tree, x: jax.Array) -> jax.Array:
        """Compute the mixture of experts; experts are split over ep, and their features over tp."""
        tp, model, sequence = self.dims.tp, self.config.model, self.config.parallel.sequence
        if sequence:
            x = gather_from_region(x, tp, 1)
        tokens = x.reshape(-1, model.width)
        up, down = (params["experts"][name].array.array for name in ("up", "down"))

        def networks(rows: jax.Array, counts: jax.Array) -> jax.Array:
            return grouped_matmul(jax.nn.gelu(grouped_matmul(rows, up, counts)), down, counts)

        routes = route(tokens, params["router"], model.top_k)
        inside, weights = copy_to_region(tokens, tp), copy_to_region(routes.weights, tp)
        y = mixture(networks, inside, weights, routes.chosen, model.experts, self.dims.ep)
        y = reduce_from_region(y, tp)
        if "shared" in params:
            y = y + jax.nn.gelu(tokens @ params["shared"]["up"]) @ params["shared"]["down"]
        # The gradients of microbatches are summed, so each has its share of the weight.
        weight = model.balance_weight / self.config.data.microbatches
        y = with_loss(y, weight * balance_loss(routes, self.dims.tokens)).reshape(x.shape)
        return scatter_to_region(y, tp, 1) if sequence else y
