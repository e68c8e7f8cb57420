"""Models in plain JAX, trained sharded or by one process alone."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402
from jax_settings import jax_settings  # noqa: E402

from parallel.jax import (  # noqa: E402
    copy_to_region,
    reduce_from_region,
)


def mlp_params(rng):
    return {
        "layers": [
            {"w": rng.normal(size=(a, b)) / np.sqrt(a), "b": np.zeros(b)}
            for a, b in [(6, 17), (17, 18), (18, 3)]
        ],
        "scale": np.float64(1.5) * np.ones(()),
        "unused": np.ones(5),
        "steps": 3,
    }


def mlp_loss(params, batch):
    x, y = batch
    for layer in params["layers"][:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    last = params["layers"][-1]
    scores = params["scale"] * (x @ last["w"] + last["b"])
    return -jax.nn.log_softmax(scores)[jnp.arange(len(y)), y].mean()


def mlp_batch(step, rank=0, world=1):
    rng = np.random.default_rng([7, step])
    x, y = rng.normal(size=(16, 6)), rng.integers(0, 3, 16)
    return x[rank::world], y[rank::world]


def transformer_params(rng, width=8, blocks=1):
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


def block(x, p, tp=None):
    def norm(x):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["norm"]

    q, k, v = jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
    x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v @ p["out"]
    inner = norm(x) if tp is None else copy_to_region(norm(x), tp)
    inner = jax.nn.gelu(inner @ p["up"]) @ p["down"]
    return x + (inner if tp is None else reduce_from_region(inner, tp))


def transformer_loss(params, batch, tp=None, remat=False):
    tokens, y = batch
    one = functools.partial(block, tp=tp)
    x = params["embedding"][tokens]
    for p in params["blocks"]:
        x = (jax.checkpoint(one) if remat else one)(x, p)
    scores = x[:, -1] @ params["embedding"].T
    return -jax.nn.log_softmax(scores)[jnp.arange(len(y)), y].mean()


def tokens_batch(step, rank=0, world=1):
    rng = np.random.default_rng([8, step])
    x = rng.integers(0, 11, (16, 5))
    return x[rank::world], ((x[:, 0] + x[:, -1]) % 11)[rank::world]


MODELS = {
    "mlp": (mlp_params, mlp_loss, mlp_batch),
    "transformer": (transformer_params, transformer_loss, tokens_batch),
    "remat": (transformer_params, functools.partial(transformer_loss, remat=True), tokens_batch),
}


def adam(params):
    zeros = lambda x: np.zeros(x.shape, x.dtype)  # noqa: E731
    return jax.tree_util.tree_map(lambda x: (zeros(x), zeros(x)), floats(params))


def floats(tree):
    return jax.tree_util.tree_map(lambda x: x if hasattr(x, "dtype") else None, tree)


def update(params, grads, state, step):
    """Adam, leaf by leaf: on parts as on wholes."""

    def one(p, g, s):
        mean, square = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g * g
        corrected = jnp.sqrt(square / (1 - 0.999**step)) + 1e-8
        return p - 0.01 * mean / (1 - 0.9**step) / corrected, (mean, square)

    leaves, tree = jax.tree_util.tree_flatten(params)
    of = iter(zip(jax.tree_util.tree_leaves(grads), pairs(state), strict=True))
    results = [one(p, *next(of)) if hasattr(p, "dtype") else (p, None) for p in leaves]
    new = jax.tree_util.tree_unflatten(tree, [p for p, _ in results])
    return new, [s for _, s in results if s is not None]


def pairs(state):
    if isinstance(state, list):
        return state
    return jax.tree_util.tree_leaves(state, is_leaf=lambda x: isinstance(x, tuple))


def train(value_and_grad, params, batches, rank=0, world=1, steps=3):
    @jax.jit
    def step_of(arrays, state, batch, step):
        params = jax.tree_util.tree_unflatten(tree, merged(arrays))
        value, grads = value_and_grad(params, batch)
        params, state = update(params, grads, state, step)
        return [x for x in jax.tree_util.tree_leaves(params) if hasattr(x, "dtype")], state, value

    leaves, tree = jax.tree_util.tree_flatten(params)

    def merged(arrays):
        rest = iter(arrays)
        return [next(rest) if hasattr(x, "dtype") else x for x in leaves]

    arrays, state = [x for x in leaves if hasattr(x, "dtype")], pairs(adam(params))
    for step in range(steps):
        arrays, state, _ = step_of(arrays, state, batches(step, rank, world), step + 1.0)
    return jax.tree_util.tree_unflatten(tree, merged(arrays))


def in_jit(function, tree):
    """Return ``function(tree)`` with NumPy arrays, from one program: op by op it would be many.

    Leaves that are no arrays stay as they are.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)

    def merged(arrays):
        rest = iter(arrays)
        whole = [next(rest) if hasattr(x, "dtype") else x for x in leaves]
        return jax.tree_util.tree_unflatten(structure, whole)

    @jax.jit
    def of(arrays):
        result = jax.tree_util.tree_leaves(function(merged(arrays)))
        return [x for x in result if hasattr(x, "dtype")]

    return merged(map(np.asarray, of([x for x in leaves if hasattr(x, "dtype")])))


@functools.cache
def alone(name):
    make, loss, batches = MODELS[name]
    with jax_settings(jax_enable_x64=True):
        params = make(np.random.default_rng(0))

        def value_and_grad(params, batch):
            leaves, tree = jax.tree_util.tree_flatten(params)
            which = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]

            def of(arrays):
                full = list(leaves)
                for i, x in zip(which, arrays, strict=True):
                    full[i] = x
                return loss(jax.tree_util.tree_unflatten(tree, full), batch)

            return jax.value_and_grad(of)([leaves[i] for i in which])

        return jax.tree_util.tree_leaves(train(value_and_grad, params, batches))


def assert_close(got, expected):
    for a, b in zip(jax.tree_util.tree_leaves(got), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
