"""Fifty jitted steps on two ranks and on one: what may be combined, in both precisions."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402

STEPS = 50
WORLD = 2
SHARE = 4  # samples a rank and step
TOLERANCE = {"f8": 1e-12, "f4": 1e-5}

pytestmark = pytest.mark.usefixtures("double_precision")


def make_params(dtype):
    rng = np.random.default_rng(0)
    return {
        "body": (rng.normal(size=(6, 16)) / 3).astype(dtype),
        "heads": [(rng.normal(size=16) / 4).astype(dtype) for _ in range(WORLD)],
    }


def inputs(dtype, uneven):
    """Return samples, targets and which samples count, all (rank, step, sample, ...)."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(WORLD, STEPS, SHARE, 6)).astype(dtype)
    valid = np.ones(x.shape[:3], bool)
    if uneven:  # the last rank has fewer and fewer samples, and none in the last steps
        valid[-1] = np.arange(SHARE) < SHARE - np.arange(STEPS)[:, None] // 10
    return x, np.sin(x.sum(-1)).astype(dtype), valid


def error(params, head, x, y, valid):
    """Return the sum over the valid samples; the head not named is not used."""
    output = jnp.tanh(x @ params["body"]) @ params["heads"][head]
    return jnp.where(valid, (output - y) ** 2, 0).sum()


def descend(gradients, params, batches):
    """Take all steps in one program."""

    def step(params, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients(params, *batch)), None

    return jax.tree.map(np.asarray, jax.jit(partial(jax.lax.scan, step))(params, batches)[0])


def one_process(dtype, unused, uneven):
    x, y, valid = inputs(dtype, uneven)

    def gradients(params, x, y, valid):
        def loss(params):
            parts = [
                error(params, rank if unused else 0, x[rank], y[rank], valid[rank])
                for rank in range(WORLD)
            ]
            return sum(parts) / valid.sum()

        return jax.grad(loss)(params)

    return descend(gradients, make_params(dtype), [a.swapaxes(0, 1) for a in (x, y, valid)])


@pytest.mark.parametrize(
    ("dtype", "micro", "hook", "unused", "uneven"),
    [
        # Accumulation and hooks alone are in test_jax_ddp.py.
        ("f8", 1, False, True, False),
        ("f4", 1, False, False, True),
        ("f8", 2, True, True, True),
        ("f4", 2, True, True, True),
    ],
)
def test_ranks_equal_one_process(dtype, micro, hook, unused, uneven):
    def rank():
        me = dist.get_rank()
        ddp = DistributedDataParallel(make_params(dtype), bucket_cap_mb=0.0003)

        def scaled_sum(group, bucket):
            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value() / group.size())

        if hook:
            ddp.register_comm_hook(ddp.process_group, scaled_sum)

        def gradients(params, x, y, valid):
            total = mj.all_reduce(valid.sum())

            def loss(params, piece):
                parts = (part[piece::micro] for part in (x, y, valid))
                return WORLD * error(params, me if unused else 0, *parts) / total

            first = None
            for piece in range(micro - 1):
                with ddp.no_sync():
                    first = ddp.value_and_grad(loss)(params, piece)[1]
            return ddp.value_and_grad(loss, accumulated=first)(params, micro - 1)[1]

        return descend(gradients, ddp.params, [part[me] for part in inputs(dtype, uneven)])

    expected = jax.tree.leaves(one_process(dtype, unused, uneven))
    results = [jax.tree.leaves(tree) for tree in run_ranks(rank, WORLD)]
    for mine, others, alone in zip(*results, expected, strict=True):
        assert mine.dtype == dtype
        np.testing.assert_array_equal(mine, others)
        np.testing.assert_allclose(mine, alone, rtol=0, atol=TOLERANCE[dtype])
