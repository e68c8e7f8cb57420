"""Models as JAX's libraries keep them; those that are not installed are skipped."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

X = np.random.default_rng(0).normal(size=(5, 8, 3)).astype(np.float32)
Y = np.sin(X.sum(-1, keepdims=True))


def check(make, train):
    """``train(ddp, xs, ys)`` returns the leaves: two ranks end with those of one process."""

    def rank():
        me, size = dist.get_rank(), dist.get_world_size()
        ddp = DistributedDataParallel(make(me))
        leaves = train(ddp, X[:, me::size], Y[:, me::size])
        return [np.asarray(leaf) for leaf in leaves]

    (expected,) = run_ranks(rank, 1)
    first, second = run_ranks(rank, 2)
    assert len(expected) == 4  # weights and biases of two layers
    for leaf, other, alone in zip(first, second, expected, strict=True):
        np.testing.assert_array_equal(leaf, other)
        np.testing.assert_allclose(leaf, alone, rtol=1e-5, atol=1e-6)


def descend(param, grad):
    return param - 0.1 * grad


def test_equinox():
    eqx = pytest.importorskip("equinox")

    def make(seed):  # beside arrays it has functions for leaves: the activations
        return eqx.nn.MLP(3, 1, 16, 1, key=jax.random.key(seed))

    def train(ddp, xs, ys):
        def loss(model, x, y):
            return ((jax.vmap(model)(x) - y) ** 2).mean()

        @eqx.filter_jit
        def step(model, x, y):
            _, grads = ddp.value_and_grad(loss)(model, x, y)
            return eqx.apply_updates(model, jax.tree.map(lambda grad: -0.1 * grad, grads))

        model = ddp.params
        for x, y in zip(xs, ys, strict=True):
            model = step(model, x, y)
        return jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))

    check(make, train)


def test_flax_linen():
    nn = pytest.importorskip("flax.linen")
    model = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(1)])

    def train(ddp, xs, ys):
        def loss(params, x, y):
            return ((model.apply(params, x) - y) ** 2).mean()

        @jax.jit
        def step(params, x, y):
            _, grads = ddp.value_and_grad(loss)(params, x, y)
            return jax.tree.map(descend, params, grads)

        params = ddp.params
        for x, y in zip(xs, ys, strict=True):
            params = step(params, x, y)
        return jax.tree.leaves(params)

    check(lambda seed: model.init(jax.random.key(seed), X[0]), train)


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")

    def model(seed):
        rngs = nnx.Rngs(seed)
        return nnx.Sequential(nnx.Linear(3, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 1, rngs=rngs))

    def train(ddp, xs, ys):
        graph, _ = nnx.split(model(0))

        def loss(state, x, y):
            return ((nnx.merge(graph, state)(x) - y) ** 2).mean()

        @jax.jit
        def step(state, x, y):
            _, grads = ddp.value_and_grad(loss)(state, x, y)
            return jax.tree.map(descend, state, grads)

        state = ddp.params
        for x, y in zip(xs, ys, strict=True):
            state = step(state, x, y)
        return jax.tree.leaves(state)

    check(lambda seed: nnx.split(model(seed))[1], train)
