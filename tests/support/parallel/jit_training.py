"""Models in plain JAX, trained sharded or by one process alone."""

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import (  # noqa: E402  # noqa: E402
    copy_to_region,
    fsdp,
    reduce_from_region,
)
from tests.support.parallel.jax_settings import jax_settings  # noqa: E402

STEPS = 20


class How(NamedTuple):
    """How a model gathers its parameters."""

    gather: Any
    layer: Any


WHOLE = How(lambda params: params, lambda fn: fn)
SHARDED = How(fsdp.gather, fsdp.layer)
REMAT = How(fsdp.gather, functools.partial(fsdp.layer, policy=None))


def mlp_params(rng):
    return {
        "layers": [
            {"w": rng.normal(size=(a, b)) / np.sqrt(a), "b": np.zeros(b)}
            for a, b in [(6, 17), (17, 18), (18, 3)]
        ],
        "scale": np.float64(1.5) * np.ones(()),
        "unused": np.ones(5),
    }


def mlp_loss(params, batch, how):
    x, y = batch
    rest = how.gather({"scale": params["scale"], "unused": params["unused"]})

    def dense(layer, x):
        return jax.nn.gelu(x @ layer["w"] + layer["b"])

    for layer in params["layers"]:
        x = how.layer(dense)(layer, x)
    return cross_entropy(rest["scale"] * x, y)


def cross_entropy(scores, y):
    return -jax.nn.log_softmax(scores)[jnp.arange(len(y)), y].mean()


def mlp_batch(step, rank=0, world=1):
    rng = np.random.default_rng([7, step])
    x, y = rng.normal(size=(24, 6)), rng.integers(0, 3, 24)
    return x[rank::world], y[rank::world]


def transformer_params(rng, width=8, blocks=2):
    def matrix(a, b):
        return rng.normal(size=(a, b)) / np.sqrt(a)

    return {
        "embedding": rng.normal(size=(11, width)),
        "blocks": [
            {
                "norm": np.ones(width),
                "qkv": matrix(width, 3 * width),
                "out": matrix(width, width),
                "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width),
            }
            for _ in range(blocks)
        ],
    }


def stacked_params(rng):
    params = transformer_params(rng, blocks=3)
    blocks = params["blocks"]
    return params | {"blocks": jax.tree_util.tree_map(lambda *each: np.stack(each), *blocks)}


def block(p, x, tp=None):
    def norm(x):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["norm"]

    q, k, v = jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v @ p["out"]
    inner = norm(x) if tp is None else copy_to_region(norm(x), tp)
    inner = jax.nn.gelu(inner @ p["up"]) @ p["down"]
    return x + (inner if tp is None else reduce_from_region(inner, tp))


def transformer_loss(params, batch, how, tp=None):
    tokens, y = batch
    one = how.layer(functools.partial(block, tp=tp))
    embedding = how.gather(params["embedding"])
    x = embedding[tokens]
    if isinstance(params["blocks"], list):
        for p in params["blocks"]:
            x = one(p, x)
    else:
        x, _ = jax.lax.scan(lambda x, p: (one(p, x), None), x, params["blocks"])
    return cross_entropy(x[:, -1] @ embedding.T, y)


def tokens_batch(step, rank=0, world=1):
    rng = np.random.default_rng([8, step])
    x = rng.integers(0, 11, (24, 5))
    return x[rank::world], ((x[:, 0] + x[:, -1]) % 11)[rank::world]


MODELS = {
    "mlp": (mlp_params, mlp_loss, mlp_batch),
    "transformer": (transformer_params, transformer_loss, tokens_batch),
    "stacked": (stacked_params, transformer_loss, tokens_batch),
}


def adam(param, grad, mean, square, step):
    """Adam, leaf by leaf: on parts as on wholes."""
    mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad * grad
    corrected = jnp.sqrt(square / (1 - 0.999**step)) + 1e-8
    return param - 0.01 * mean / (1 - 0.9**step) / corrected, mean, square


def start(params):
    zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
    return params, zeros, zeros


def train(loss, state, batches, rank=0, world=1, steps=range(STEPS)):
    """Return ``state``, as ``start`` makes it, after ``steps``, and the losses."""

    @jax.jit
    def step_of(state, batch, number):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        leaves, tree = zip(*map(jax.tree_util.tree_flatten, (*state, grads)), strict=True)
        new = [adam(p, g, m, s, number) for p, m, s, g in zip(*leaves, strict=True)]
        return tuple(tree[0].unflatten(x) for x in zip(*new, strict=True)), value

    losses = []
    for step in steps:
        state, value = step_of(state, batches(step, rank, world), step + 1.0)
        losses.append(float(value))
    return state, losses


@functools.cache
def alone(name):
    """Return the parameters after training on one process, and the losses."""
    make, loss, batches = MODELS[name]
    with jax_settings(jax_enable_x64=True):
        params = jax.tree_util.tree_map(jnp.asarray, make(np.random.default_rng(0)))
        state, losses = train(functools.partial(loss, how=WHOLE), start(params), batches)
        return jax.tree_util.tree_map(np.asarray, state[0]), losses


def train_sharded(name, mesh, how=SHARDED, **options):
    """Return the whole parameters after training on ``mesh``."""
    make, loss, batches = MODELS[name]
    if name == "stacked":
        options["stacked"] = ["blocks"]
    parts = fsdp.shard(make(np.random.default_rng(0)), mesh, **options)
    loss = functools.partial(loss, how=how)
    state, _ = train(loss, start(parts), batches, mesh.process_group.rank(), mesh.size())
    return whole(state[0])


def whole(parts):
    """Return the whole arrays of parts, NumPy's, by one program: op by op it would be many."""
    return jax.tree_util.tree_map(np.asarray, jax.jit(fsdp.gather)(parts))


def assert_close(got, expected, atol=1e-9):
    got, expected = map(jax.tree_util.tree_leaves, (got, expected))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)
