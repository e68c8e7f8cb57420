"""Sequence parallel, vocab-parallel embedding and loss inside ``jax.jit``: equal to the whole."""

import re

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import (  # noqa: E402
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

VOCABULARY, WIDTH = 12, 6

pytestmark = pytest.mark.usefixtures("double_precision")


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"table": (VOCABULARY, WIDTH), "scale": (WIDTH,), "w_in": (WIDTH, 8)}
    shapes |= {"w_out": (8, WIDTH), "head": (WIDTH, VOCABULARY)}
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


SPLIT = {"table": 0, "scale": None, "w_in": 1, "w_out": 0, "head": 1}
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (2, 5))


def shard(params, rank, size):
    return {
        name: x if SPLIT[name] is None else np.split(x, size, SPLIT[name])[rank]
        for name, x in params.items()
    }


def norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def loss(params, tokens):
    x = params["table"][tokens[:, :-1]]
    x = x + jax.nn.gelu(norm(x, params["scale"]) @ params["w_in"]) @ params["w_out"]
    scores = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


def split_loss(params, tokens, tp):
    x = vocab_parallel_embedding(params["table"], tokens[:, :-1], tp, axis=1)
    y = copy_to_region(norm(x, copy_to_region(params["scale"], tp)), tp, 1)
    x = x + reduce_from_region(jax.nn.gelu(y @ params["w_in"]) @ params["w_out"], tp, 1)
    # There and back again.
    x = scatter_to_region(gather_from_region(x, tp, 1), tp, 1)
    logits = copy_to_region(x, tp, 1) @ params["head"]
    return vocab_parallel_cross_entropy(logits, tokens[:, 1:], tp).mean()


@pytest.mark.timeout(300)  # programs take long to compile
def test_equal_to_the_whole_model():
    n, params, lr = 2, make_params(), 0.3
    reference, losses = params, []
    whole = jax.jit(jax.value_and_grad(loss))
    for _ in range(20):
        value, grads = whole(reference, TOKENS)
        losses.append(float(value))
        reference = jax.tree.map(lambda p, g: p - lr * g, reference, grads)

    def rank():
        tp = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        step = jax.jit(jax.value_and_grad(lambda p: split_loss(p, TOKENS, tp)))
        mine, seen = shard(params, dist.get_rank(), n), []
        for _ in range(20):
            value, grads = step(mine)
            seen.append(float(value))
            mine = jax.tree.map(lambda p, g: p - lr * g, mine, grads)
        return mine, seen

    for number, (got, seen) in enumerate(run_ranks(rank, n, timeout=200)):
        np.testing.assert_allclose(seen, losses, rtol=0, atol=1e-9)
        expected = shard(jax.tree.map(np.asarray, reference), number, n)
        for name, array in got.items():
            np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-9, err_msg=name)


def test_a_sequence_that_does_not_divide():
    def rank():
        with pytest.raises(ValueError, match=re.escape("x has shape (2, 3, 4); its dim 1 is not")):
            reduce_from_region(jnp.ones((2, 3, 4)), dist.group.WORLD, 1)

    run_ranks(rank, 2)
