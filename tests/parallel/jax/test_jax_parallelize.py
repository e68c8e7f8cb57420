"""``parallelize`` of pytrees: the model's functions stay, and compute what one process computes."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.checkpoint import load, save
from meshlib.sharding import Replicate, Shard
from meshlib.testing import run_ranks
from parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from parallel.jax import (  # noqa: E402
    SplitWeight,
    fsdp,
    parallelize,
    share_input,
    vocab_parallel_cross_entropy,
)

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEAD = 12, 8, 12, 2, 2

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.timeout(240)]


def make_params():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape) / 2

    return {
        "embedding": draw(VOCABULARY, WIDTH),
        "blocks": [
            {
                "attention_norm": draw(WIDTH),
                "attention": {name: draw(WIDTH, WIDTH) for name in ("q", "k", "v", "out")},
                "norm": draw(WIDTH),
                "up": {"w": draw(WIDTH, HIDDEN), "b": draw(HIDDEN)},
                "down": {"w": draw(HIDDEN, WIDTH), "b": draw(WIDTH)},
            }
            for _ in range(LAYERS)
        ],
        "head": draw(WIDTH, VOCABULARY),
    }


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (4, 7))


def norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def attend(params, x):
    """As one process would write it, but that queries, keys and values share their input."""
    x = share_input(x, params["q"], params["k"], params["v"])
    q, k, v = ((x @ params[name]) for name in "qkv")
    q, k, v = (y.reshape(*y.shape[:2], -1, HEAD) for y in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(*y.shape[:2], -1) @ params["out"]


def logits(params, tokens):
    x = params["embedding"][tokens]
    for block in params["blocks"]:
        x = x + attend(block["attention"], norm(x, block["attention_norm"]))
        up, down = block["up"], block["down"]
        x = x + jax.nn.gelu(norm(x, block["norm"]) @ up["w"] + up["b"]) @ down["w"] + down["b"]
    return x @ params["head"]


def loss(params, tokens, tp=None):
    scores = logits(params, tokens[:, :-1])
    if tp is not None:
        return vocab_parallel_cross_entropy(scores, tokens[:, 1:], tp).mean()
    scores = jax.nn.log_softmax(scores)
    return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()


def plan(sequence):
    outside = Shard(1) if sequence else Replicate()
    styles = {
        "embedding": RowwiseParallel(output_layouts=outside),
        "blocks.*.attention.[qkv]": ColwiseParallel(input_layouts=outside),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=outside),
        "blocks.*.up": ColwiseParallel(input_layouts=outside),
        "blocks.*.down": RowwiseParallel(output_layouts=outside),
        "head": ColwiseParallel(input_layouts=outside),
    }
    if sequence:
        styles |= {
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.attention_norm": SequenceParallel(),
        }
    return styles


def train(step, params):
    losses = []
    for _ in range(20):
        value, grads = step(params)
        losses.append(float(value))
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, grads)
    return np.array(losses), params


@pytest.mark.parametrize(("n", "sequence"), [(2, False), (2, True)])
def test_training_equals_one_process(n, sequence):
    expected, whole = train(jax.jit(jax.value_and_grad(lambda p: loss(p, TOKENS))), make_params())
    assert expected[-1] < expected[0]

    def rank():
        tp = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))["tp"]
        params = parallelize(make_params(), tp, plan(sequence))
        assert params["head"].shape == (WIDTH, VOCABULARY)
        assert params["head"].array.shape == (WIDTH, VOCABULARY // n)
        losses, params = train(jax.jit(jax.value_and_grad(lambda p: loss(p, TOKENS, tp))), params)
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-9)
        # What was trained is this rank's part of what one process has trained.
        ours, theirs = (
            jax.tree.leaves(params),
            jax.tree.leaves(parallelize(whole, tp, plan(sequence))),
        )
        for own, part in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(own, part, rtol=0, atol=1e-9)

    run_ranks(rank, n, timeout=200)


def test_equinox_modules():
    """Whose matrices are (out, in), and whose functions are for one sample."""
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 4)))

    def make():
        keys = jax.random.split(jax.random.key(0), 2)
        return {"up": eqx.nn.Linear(4, 6, key=keys[0]), "down": eqx.nn.Linear(6, 4, key=keys[1])}

    def loss(layers):
        apply = jax.vmap(lambda one: layers["down"](jnp.tanh(layers["up"](one))))
        return jnp.sin(apply(x)).mean()

    expected, grads = jax.value_and_grad(loss)(make())

    def rank():
        tp = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        layers = parallelize(make(), tp, styles, features_first=True)
        assert isinstance(layers["up"].weight, SplitWeight)
        value, own = jax.jit(jax.value_and_grad(loss))(layers)
        np.testing.assert_allclose(value, expected, atol=1e-12)
        parts = parallelize(grads, tp, styles, features_first=True)
        for one, part in zip(jax.tree.leaves(own), jax.tree.leaves(parts), strict=True):
            np.testing.assert_allclose(one, part, atol=1e-12)

    run_ranks(rank, 2, timeout=100)


COLUMNS, UP = ColwiseParallel(), "blocks.0.up"
BAD = [
    (
        {"blocks.*.upp": COLUMNS},
        ValueError,
        "which the tree does not have; similar names: 'blocks.1.up'",
    ),
    ({"blocks.*.up": COLUMNS, f"{UP}.w": COLUMNS}, ValueError, "both 'blocks.*.up'"),
    (
        {"head": PrepareModuleInput(Shard(1), Replicate())},
        TypeError,
        "for 'head', but a tree has",
    ),
    ({"head": "columns"}, TypeError, "plan['head'] must be a ParallelStyle"),
    (
        {UP: COLUMNS},
        ValueError,
        f"'{UP}.b' has shape (12,): axis 0 is not divisible by the 5 ranks",
    ),
]


@pytest.mark.parametrize(("styles", "kind", "message"), BAD)
def test_bad_plans_are_named(styles, kind, message):
    def rank():
        tp = dist.init_device_mesh("cpu", (5,), mesh_dim_names=("tp",))["tp"]
        with pytest.raises(kind) as caught:
            parallelize(make_params(), tp, styles)
        assert message in str(caught.value)

    run_ranks(rank, 5, timeout=60)


def test_products_that_a_split_does_not_have():
    def rank():
        tp = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
        params = parallelize(make_params(), tp, plan(False))
        x = jnp.ones((3, WIDTH))
        with pytest.raises(TypeError, match=r"w @ x: the weight has shape \(8, 12\), and is"):
            params["head"] @ x.T
        with pytest.raises(TypeError, match=r"needs a weight split by RowwiseParallel\(\) along"):
            params["head"][jnp.arange(2)]
        with pytest.raises(ValueError, match="must all be split by one style"):
            share_input(x, params["head"], x)
        with pytest.raises(TypeError, match="only products with weights"):
            np.asarray(share_input(x, params["head"]))

    run_ranks(rank, 2, timeout=60)


def test_flax_modules():
    """Whose layers take their products, and leave dtypes alone, as they are told."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, 4)))
    options = {
        "param_dtype": jnp.float64,
        "promote_dtype": lambda arrays, **_: arrays,
        "dot_general": lambda x, w, *_, **__: x @ w,
    }

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 6, rngs=rngs, **options)
            self.down = nnx.Linear(6, 4, rngs=rngs, **options)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    graph, whole = nnx.split(Model(nnx.Rngs(0)))

    def loss(params):
        return jnp.sin(nnx.merge(graph, params)(x)).mean()

    expected, grads = jax.value_and_grad(loss)(whole)

    def rank():
        tp = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        params = parallelize(whole, tp, styles)
        assert [leaf.shape for leaf in jax.tree.leaves(params)] == [(4,), (3, 4), (3,), (4, 3)]
        value, own = jax.jit(jax.value_and_grad(loss))(params)
        np.testing.assert_allclose(value, expected, atol=1e-12)
        parts = parallelize(grads, tp, styles)
        for one, part in zip(jax.tree.leaves(own), jax.tree.leaves(parts), strict=True):
            np.testing.assert_allclose(one, part, atol=1e-12)

    run_ranks(rank, 2, timeout=100)


def test_what_is_split_twice_is_saved_whole_and_loads_on_another_mesh(tmp_path):
    rng = np.random.default_rng(3)
    whole = {
        "up": rng.normal(size=(8, 4)),
        "down": rng.normal(size=(4, 8)),
        "norm": rng.normal(size=8),
    }
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "norm": SequenceParallel()}

    def program(shape, again):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        params = jax.tree.map(np.zeros_like, whole) if again else whole
        parts = fsdp.shard(parallelize(params, mesh["tp"], plan), mesh["dp"])
        if again:
            parts = fsdp.from_global(load(tmp_path, fsdp.to_global(parts)), parts)
        else:
            save(tmp_path, fsdp.to_global(parts), step=1, sync=False)
        expected = fsdp.shard(parallelize(whole, mesh["tp"], plan), mesh["dp"])
        jax.tree.map(np.testing.assert_array_equal, parts, expected)

    run_ranks(program, 4, (2, 2), False)
    saved = load(tmp_path)
    for name, value in whole.items():
        np.testing.assert_array_equal(saved[name], value)
    run_ranks(program, 2, (1, 2), True)
    run_ranks(program, 2, (2, 1), True)
