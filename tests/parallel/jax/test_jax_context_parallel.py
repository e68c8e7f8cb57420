"""Ring attention and Ulysses inside ``jax.jit``: values and gradients of one process."""

import threading
from functools import partial

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

import meshlib.jit as mj  # noqa: E402
from meshlib.extend.jit import host_call  # noqa: E402
from parallel.jax import (  # noqa: E402
    _ring,
    ring_attention,
    sequence_positions,
    split_sequence,
    ulysses_attention,
)
from tests.support.parallel.jax_settings import jax_settings  # noqa: E402

LENGTH, WIDTH, HEADS, KV_HEADS = 12, 8, 4, 2

pytestmark = pytest.mark.usefixtures("double_precision")


def make_params():
    rng = np.random.default_rng(0)
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH // 2), "v": (WIDTH, WIDTH // 2)}
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


DATA = np.random.default_rng(1).normal(size=(2, LENGTH, WIDTH))


def loss(params, x, attention):
    q, k, v = (
        (x @ params[name]).reshape(*x.shape[:2], heads, -1)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    return jnp.sin(3 * (x + attention(q, k, v).reshape(x.shape))).mean()


def train(step, params):
    losses = []
    for _ in range(20):
        value, grads = step(params)
        losses.append(value)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    return np.array(losses), jax.tree.map(np.asarray, params)


def whole_attention(q, k, v, causal=True):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
    if causal:
        scores = jnp.where(np.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.fixture(scope="module")
def alone():
    with jax_settings(jax_enable_x64=True):
        step = jax.jit(jax.value_and_grad(lambda p: loss(p, DATA, whole_attention)))
        return train(step, make_params())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("n", "method"), [(3, "ring"), (2, "all_to_all")])
def test_training_equals_one_process(n, method, alone):
    def rank():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))

        def attention(q, k, v):
            if method == "all_to_all":
                return ulysses_attention(q, k, v, mesh["cp"])
            return ring_attention(q, k, v, mesh["cp"])

        places = sequence_positions(LENGTH // n, mesh["cp"], zigzag=method == "ring")

        @jax.jit
        def step(params):
            whole = jax.value_and_grad(lambda p: loss(p, DATA[:, places], attention))(params)
            return mj.all_reduce(whole, dist.ReduceOp.AVG, mesh["cp"])

        losses, params = train(step, make_params())
        return losses, params

    for losses, params in run_ranks(rank, n, timeout=200):  # programs take long to compile
        np.testing.assert_allclose(losses, alone[0], rtol=0, atol=1e-9)
        for name, array in alone[1].items():
            np.testing.assert_allclose(params[name], array, rtol=0, atol=1e-9, err_msg=name)


KINDS = {
    "ring": ring_attention,
    "ring in a row": partial(ring_attention, zigzag=False),
    "all_to_all": ulysses_attention,
}


@pytest.mark.parametrize(
    ("kind", "causal", "n", "kv_heads"),
    [
        ("ring", True, 2, 1),
        ("ring", True, 4, 2),
        ("ring", False, 3, 3),
        ("ring in a row", True, 3, 1),
        ("ring in a row", False, 2, 2),
        ("all_to_all", True, 3, 3),
        ("all_to_all", False, 2, 2),
    ],
)
def test_attention_and_its_gradients_are_those_of_one_process(kind, causal, n, kv_heads):
    """Also with fewer heads of keys, which only an all-to-all must be able to divide."""
    rng = np.random.default_rng(4)
    shape = 2, 4 * n
    q, grad = (rng.normal(size=(*shape, 2 * kv_heads, 3)) for _ in range(2))
    k, v = (rng.normal(size=(*shape, kv_heads, 3)) for _ in range(2))
    if kind == "all_to_all":
        q, grad = (np.concatenate([x] * n, axis=2) for x in (q, grad))
    out, back = jax.vjp(partial(whole_attention, causal=causal), q, k, v)
    expected = [np.asarray(x) for x in (out, *back(jnp.asarray(grad)))]

    def rank():
        zigzag = kind == "ring"
        own = [split_sequence(x, zigzag=zigzag) for x in (q, k, v, grad)]
        attend = jax.jit(partial(KINDS[kind], mesh=None, causal=causal))
        got, pull = jax.vjp(attend, *own[:3])
        for ours, whole in zip((got, *pull(jnp.asarray(own[3]))), expected, strict=True):
            places = sequence_positions(4, zigzag=zigzag)
            np.testing.assert_allclose(ours, whole[:, places], rtol=0, atol=1e-12)

    run_ranks(rank, n, timeout=120)


def test_positions_of_a_zigzag_are_an_early_and_a_late_chunk():
    def rank():
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        places = sequence_positions(4, mesh["cp"])
        tokens = np.arange(24).reshape(2, 12)
        np.testing.assert_array_equal(split_sequence(tokens, mesh["cp"]), tokens[:, places])
        own = jax.jit(lambda x: split_sequence(x, mesh["cp"]))(tokens)
        np.testing.assert_array_equal(own, tokens[:, places])
        row = sequence_positions(4, mesh["cp"], zigzag=False)
        np.testing.assert_array_equal(split_sequence(tokens.T, dim=0, zigzag=False), tokens.T[row])
        return places.tolist()

    assert run_ranks(rank, 3) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def pairs(n, causal, zigzag, length=8):
    """Return how many pairs of a query and a key each rank computes."""
    counts = []
    for rank in range(n):
        total = 0
        for source in range(n):
            block = _ring.visible_block(rank, source, length // 2, causal=causal, zigzag=zigzag)
            if block is not None:
                shape = len(range(length)[block.queries]), len(range(length)[block.keys])
                total += shape[0] * (shape[0] + 1) // 2 if block.causal else shape[0] * shape[1]
        counts.append(total)
    return counts


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_zigzag_is_the_same_work_on_all_ranks_and_a_row_is_not(n):
    whole = 8 * n * (8 * n + 1) // 2
    for zigzag in (True, False):
        counts = pairs(n, True, zigzag)
        assert sum(counts) == whole
        assert (len(set(counts)) == 1) is zigzag
    assert set(pairs(n, False, True)) == {8 * 8 * n}


def test_large_scores_do_not_overflow():
    def rank():
        q = np.full((1, 4, 1, 2), 1e3)
        got = jax.jit(partial(ring_attention, mesh=None))(q, q, q)
        np.testing.assert_allclose(got, q, rtol=1e-9)

    run_ranks(rank, 2)


def test_without_a_mask_and_in_half_precision():
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(1, 8, 2, 4)).astype("f2") for _ in range(3))
    wide = (jnp.asarray(x, "f8") for x in (q, k, v))
    whole = np.asarray(whole_attention(*wide, causal=False))

    def rank():
        places = sequence_positions(4)
        attention = jax.jit(partial(ring_attention, mesh=None, causal=False))
        own = attention(*(jnp.asarray(x[:, places]) for x in (q, k, v)))
        assert own.dtype == jnp.float16
        np.testing.assert_allclose(own, whole[:, places], atol=4e-3)

    run_ranks(rank, 2)


@pytest.mark.parametrize("name", ["attend", "attend_backward"])
def test_keys_pass_while_the_rank_computes(name, monkeypatch):
    """Rank 0 computes with its own keys until rank 1, which comes later, computes with them."""
    attend, steps = getattr(_ring, name), [iter(range(2)), iter(range(2))]
    begun = [threading.Event(), threading.Event()]

    def noted(q, k, *others, **options):
        me = dist.get_rank()
        step = next(steps[me])

        def begin(outputs, inputs, _):
            outputs[0][...] = inputs[0]
            if me == step:  # here are the keys of rank 0
                begun[me].set()
                assert begun[1].wait(60), "rank 1 has not got them"

        spec = jax.ShapeDtypeStruct(q.shape, q.dtype)
        (q,) = host_call(begin, [spec], q, k, ordered=False)
        return attend(q, k, *others, **options)

    monkeypatch.setattr(_ring, name, noted)
    backward = name == "attend_backward"

    def rank():
        def late(program):
            if dist.get_rank() == 1:
                assert begun[0].wait(60), "rank 0 has not begun"
            return jax.block_until_ready(program())

        places = sequence_positions(4)
        own = [jnp.asarray(x[:, places]) for x in qkv]
        attention = jax.jit(partial(ring_attention, mesh=None))
        if not backward:
            late(lambda: attention(*own))
            return
        out, back = jax.vjp(attention, *own)
        jax.block_until_ready(out)
        late(lambda: jax.jit(lambda back: back(jnp.ones_like(out)))(back))

    rng = np.random.default_rng(3)
    qkv = [rng.normal(size=(1, 8, 2, 4)) for _ in range(3)]
    run_ranks(rank, 2, timeout=120)


def test_memory_does_not_grow_with_the_ring():
    """What a rank's program takes besides its arguments: blocks, and the keys that it has."""

    def rank():
        x = jax.ShapeDtypeStruct((1, 64, 2, 8), "float64")

        def step(q, k, v):
            return jax.vjp(partial(ring_attention, mesh=None), q, k, v)[1](q)

        return jax.jit(step).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    # Of two ranks JAX 0.12 makes a smaller program; from three on it stays the same.
    few, many = (max(run_ranks(rank, n, timeout=120)) for n in (3, 5))
    assert many <= 1.1 * few


def test_bad_arguments_are_named_while_tracing():
    def rank():
        x = jnp.ones((1, 3, 3, 4))
        with pytest.raises(ValueError, match="2 ranks has 3 positions of a sequence of 6, which"):
            ring_attention(x, x, x, None)
        with pytest.raises(
            ValueError, match="q has 3 heads, which are not divisible by the 2 ranks"
        ):
            ulysses_attention(x, x, x, None)
        with pytest.raises(ValueError, match="the heads of q a multiple of those"):
            ring_attention(x, x[:, :, :2], x[:, :, :2], None)
        with pytest.raises(ValueError, match=r"dim 1 of x has length 6, .* the 4 zigzag chunks"):
            split_sequence(np.ones((2, 6)))
        with pytest.raises(ValueError, match="has length 5, which is not divisible by the 2 ranks"):
            split_sequence(np.ones((2, 5)), zigzag=False)
        with pytest.raises(ValueError, match=r"\[2, 5\] has no dim 2"):
            split_sequence(np.ones((2, 5)), dim=2)

    run_ranks(rank, 2)
