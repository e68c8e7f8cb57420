"""Megatron's operators inside ``jax.jit``: sharded layers equal whole ones, with dp beside tp."""

import re

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import (  # noqa: E402
    DistributedDataParallel,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)

pytestmark = pytest.mark.usefixtures("double_precision")


def make_params():
    rng = np.random.default_rng(0)
    return {
        "norm": rng.normal(size=6),
        "w_in": rng.normal(size=(6, 8)) / 3,
        "w_out": rng.normal(size=(8, 6)) / 3,
        "head": rng.normal(size=(6, 4)) / 3,
    }


DATA = np.random.default_rng(1).normal(size=(8, 6))


def shard(params, rank, size):
    def part(x, axis):
        return np.split(x, size, axis)[rank]

    return {
        "norm": params["norm"],
        "w_in": part(params["w_in"], 1),
        "w_out": part(params["w_out"], 0),
        "head": part(params["head"], 1),
    }


def loss(params, x, tp=None):
    def f(x):
        return x if tp is None else copy_to_region(x, tp)

    def g(x):
        return x if tp is None else reduce_from_region(x, tp)

    x = jnp.tanh(x * params["norm"])
    x = x + g(jax.nn.gelu(f(x) @ params["w_in"]) @ params["w_out"])
    y = f(x) @ params["head"]
    if tp is not None:
        y = gather_from_region(y, tp)
        # There and back again: each rank squares its part.
        y = gather_from_region(scatter_to_region(y, tp) ** 2, tp)
    else:
        y = y**2
    return jnp.sin(y).mean()


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_equal_to_the_whole_model(shape):
    params, lr = make_params(), 0.3
    reference, losses = params, []
    for _ in range(5):
        value, grads = jax.value_and_grad(loss)(reference, DATA)
        losses.append(float(value))
        reference = jax.tree.map(lambda p, g: p - lr * g, reference, grads)

    def rank():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        dp, tp = mesh["dp"], mesh["tp"]
        mine = shard(params, dist.get_rank(tp), 2)
        ddp = DistributedDataParallel(mine, dp, bucket_cap_mb=1e-5)
        x = DATA[dist.get_rank(dp) :: shape[0]]

        @jax.jit
        def step(params):
            value, grads = ddp.value_and_grad(jax.checkpoint(lambda p: loss(p, x, tp)))(params)
            return value, jax.tree.map(lambda p, g: p - lr * g, params, grads)

        trained = ddp.params
        for _ in range(5):
            value, trained = step(trained)
        return trained, dp.all_reduce(np.array(value), op=dist.ReduceOp.AVG), dist.get_rank(tp)

    for trained, value, part in run_ranks(rank, shape[0] * 2):
        assert float(value) == pytest.approx(losses[-1], rel=1e-13)
        expected = shard(jax.tree.map(np.asarray, reference), part, 2)
        for name, array in trained.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-12, err_msg=name)


def test_a_dim_that_does_not_divide():
    def rank():
        with pytest.raises(ValueError, match=re.escape("x has shape (2, 3); its last dim")):
            scatter_to_region(jnp.ones((2, 3)), dist.group.WORLD)

    run_ranks(rank, 2)
