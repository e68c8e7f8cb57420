"""Models as JAX's libraries keep them, sharded; those that are not installed are skipped."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import fsdp  # noqa: E402
from tests.support.parallel.jit_training import assert_close  # noqa: E402

pytestmark = pytest.mark.usefixtures("double_precision")

X = np.random.default_rng(0).normal(size=(20, 8, 3))
Y = np.sin(X.sum(-1, keepdims=True))


def descend(param, grad):
    return param - 0.1 * grad


def check(train, arrays):
    """``train(mesh, xs, ys)`` returns ``arrays`` leaves: two ranks' are those of one process."""

    def rank():
        mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp_shard",))
        me, size = mesh.get_rank(), mesh.size()
        return [np.asarray(leaf) for leaf in train(mesh, X[:, me::size], Y[:, me::size])]

    (expected,) = run_ranks(rank, 1)
    assert len(expected) == arrays
    assert all(leaf.dtype == np.float64 for leaf in expected)
    for leaves in run_ranks(rank, 2):
        assert_close(leaves, expected)


def trained(step, model, xs, ys):
    for x, y in zip(xs, ys, strict=True):
        model = step(model, x, y)
    return jax.tree.leaves(jax.jit(fsdp.unshard)(model))


def test_equinox_layers_by_path():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")

    def train(mesh, xs, ys):
        # Beside arrays it has functions for leaves: the activations.
        model = eqx.nn.MLP(3, 1, 16, 2, key=jax.random.key(0), dtype=jnp.float64)
        model = fsdp.shard(model, mesh, layers=["layers.*"])
        assert all(isinstance(layer, fsdp.ShardedLayer) for layer in model.layers)

        def loss(model, x, y):
            return ((jax.vmap(fsdp.gather(model))(x) - y) ** 2).mean()

        @eqx.filter_jit
        def step(model, x, y):
            grads = eqx.filter_grad(loss)(model, x, y)
            return eqx.apply_updates(model, jax.tree.map(lambda grad: -0.1 * grad, grads))

        for x, y in zip(xs, ys, strict=True):
            model = step(model, x, y)
        whole = fsdp.unshard(model)
        assert whole.activation is jax.nn.relu
        return jax.tree.leaves(eqx.filter(whole, eqx.is_inexact_array))

    check(train, 6)


def test_equinox_stacked_layers():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")

    def train(mesh, xs, ys):
        def make(key):
            return eqx.nn.Linear(3, 3, key=key, dtype=jnp.float64)

        layers = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 4))
        model = fsdp.shard({"layers": layers}, mesh, stacked=["layers"])
        one = fsdp.layer(lambda layer, x: x + jnp.tanh(jax.vmap(layer)(x)))

        def loss(model, x, y):
            out, _ = jax.lax.scan(lambda x, layer: (one(layer, x), None), x, model["layers"])
            return ((out.sum(-1, keepdims=True) - y) ** 2).mean()

        @jax.jit
        def step(model, x, y):
            return jax.tree.map(descend, model, jax.grad(loss)(model, x, y))

        return trained(step, model, xs, ys)

    check(train, 2)


def test_flax_nnx_layers():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    def train(mesh, xs, ys):
        rngs = nnx.Rngs(0)
        widths = [(3, 16), (16, 16), (16, 1)]
        layers = [nnx.Linear(a, b, rngs=rngs, param_dtype=jnp.float64) for a, b in widths]
        graphs, states = zip(*map(nnx.split, layers), strict=True)
        model = fsdp.shard(list(states), mesh)

        def loss(model, x, y):
            for graph, state in zip(graphs, model, strict=True):
                one = fsdp.layer(lambda state, x, graph=graph: jnp.tanh(nnx.merge(graph, state)(x)))
                x = one(state, x)
            return ((x - y) ** 2).mean()

        @jax.jit
        def step(model, x, y):
            return jax.tree.map(descend, model, jax.grad(loss)(model, x, y))

        return trained(step, model, xs, ys)

    check(train, 6)


def test_flax_nnx_stacked_layers():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    def train(mesh, xs, ys):
        @nnx.split_rngs(splits=4)
        @nnx.vmap
        def make(rngs):
            return nnx.Linear(3, 3, rngs=rngs, param_dtype=jnp.float64)

        graph, state = nnx.split(make(nnx.Rngs(0)))
        model = fsdp.shard({"layers": state}, mesh, stacked=["layers"])
        one = fsdp.layer(lambda state, x: x + jnp.tanh(nnx.merge(graph, state)(x)))

        def loss(model, x, y):
            out, _ = jax.lax.scan(lambda x, state: (one(state, x), None), x, model["layers"])
            return ((out.sum(-1, keepdims=True) - y) ** 2).mean()

        @jax.jit
        def step(model, x, y):
            return jax.tree.map(descend, model, jax.grad(loss)(model, x, y))

        return trained(step, model, xs, ys)

    check(train, 2)


def test_flax_nnx_layers_by_path():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

    def train(mesh, xs, ys):
        rngs = nnx.Rngs(0)

        class Model(nnx.Module):
            def __init__(self):
                self.first = nnx.Linear(3, 8, rngs=rngs, param_dtype=jnp.float64)
                self.last = nnx.Linear(8, 1, rngs=rngs, param_dtype=jnp.float64)

            def __call__(self, x):
                return self.last(jnp.tanh(self.first(x)))

        model = fsdp.shard(Model(), mesh, layers=["first"])
        assert isinstance(model.first, fsdp.ShardedLayer)

        def loss(model, x, y):
            return ((fsdp.gather(model)(x) - y) ** 2).mean()

        @jax.jit
        def step(model, x, y):
            return jax.tree.map(descend, model, jax.grad(loss)(model, x, y))

        return trained(step, model, xs, ys)

    check(train, 4)
