"""Attention, rotary embedding and RMSNorm: against finite differences, by hand, and against JAX."""

import numpy as np
import pytest

from parallel import nn
from tests.support.parallel.finite_differences import numeric


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0, dtype="f8"):
    return rng(seed).normal(size=shape).astype(dtype)


def by_hand(q, k, v, causal):
    """One head of one sample at a time, the softmax as a matrix."""
    out = np.zeros_like(q)
    groups = q.shape[2] // k.shape[2]
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        scores = q[b, :, h] @ k[b, :, h // groups].T / np.sqrt(q.shape[3])
        if causal:
            scores[np.triu_indices(len(scores), 1)] = -np.inf
        weights = np.exp(scores)
        out[b, :, h] = weights / weights.sum(1, keepdims=True) @ v[b, :, h // groups]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_attention_of_heads(heads, kv_heads, causal):
    core = nn.DotProductAttention(causal)
    q = normal(2, 5, heads, 4)
    k, v = normal(2, 5, kv_heads, 4, seed=1), normal(2, 5, kv_heads, 4, seed=2)
    weights = normal(2, 5, heads, 4, seed=3)
    np.testing.assert_allclose(core(q, k, v), by_hand(q, k, v, causal), atol=1e-13)
    grads = core.backward(weights)
    core.eval()
    for x, grad in zip((q, k, v), grads, strict=True):
        np.testing.assert_allclose(grad, numeric(lambda: core(q, k, v), x, weights), atol=1e-8)


LAYERS = {
    "attention": lambda: nn.MultiHeadAttention(8, 2, rng=rng(), dtype="f8"),
    "grouped": lambda: nn.MultiHeadAttention(8, 4, 2, bias=True, rng=rng(), dtype="f8"),
    "to all, no rotary": lambda: nn.MultiHeadAttention(
        8, 2, causal=False, rotary_base=None, rng=rng(), dtype="f8"
    ),
    "rms_norm": lambda: nn.RMSNorm(8, dtype="f8"),
    "residual": lambda: nn.Residual(
        nn.RMSNorm(8, dtype="f8"), nn.Linear(8, 8, rng=rng(), dtype="f8"), nn.Tanh()
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_match_finite_differences(name):
    layer = LAYERS[name]()
    for i, parameter in enumerate(layer.parameters()):
        parameter.data += 0.3 * normal(*parameter.shape, seed=10 + i)
    x, weights = normal(2, 3, 8, seed=1), normal(2, 3, 8, seed=2)
    layer(x)
    input_grad = layer.backward(weights)
    assert layer.outstanding == 0
    layer.eval()
    np.testing.assert_allclose(input_grad, numeric(lambda: layer(x), x, weights), atol=1e-8)
    for path, parameter in layer.named_parameters():
        expected = numeric(lambda: layer(x), parameter.data, weights)
        np.testing.assert_allclose(parameter.grad, expected, atol=1e-8, err_msg=path)


def test_attention_and_its_gradients_are_those_of_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

    q, grad = normal(2, 7, 4, 4, dtype="f4"), normal(2, 7, 4, 4, seed=3, dtype="f4")
    k, v = (normal(2, 7, 2, 4, seed=seed, dtype="f4") for seed in (1, 2))

    def theirs(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    expected, pull = jax.vjp(jax.jit(theirs), q, k, v)
    gradients = pull(grad)
    core = nn.DotProductAttention()
    np.testing.assert_allclose(core(q, k, v), expected, atol=1e-5)
    for ours, one in zip(core.backward(grad), gradients, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, one, atol=1e-5)


def test_no_place_sees_a_later_one():
    layer = nn.MultiHeadAttention(8, 2, rng=rng(), dtype="f8").eval()
    x = normal(1, 6, 8)
    y = layer(x)
    x[:, 4:] += 1
    changed = layer(x)
    np.testing.assert_array_equal(changed[:, :4], y[:, :4])
    assert np.abs(changed[:, 4:] - y[:, 4:]).min() > 1e-4


def test_large_scores_do_not_overflow():
    q = np.full((1, 3, 1, 2), 1e3)
    np.testing.assert_array_equal(nn.DotProductAttention()(q, q, q), q)


def test_half_precision_keeps_its_softmax_in_float32():
    q, k, v = (normal(1, 64, 2, 8, seed=seed, dtype="f2") for seed in range(3))
    core = nn.DotProductAttention()
    out = core(q, k, v)
    grads = core.backward(q)
    assert {x.dtype for x in (out, *grads)} == {np.dtype("f2")}
    expected = by_hand(*(x.astype("f8") for x in (q, k, v)), True)
    np.testing.assert_allclose(out, expected, atol=2e-3)


def test_rotary_products_depend_on_the_distance_alone():
    rotary = nn.RotaryEmbedding(8, base=100.0)
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def product(first, second):
        return (rotary(q, np.array([first])) * rotary(k, np.array([second]))).sum()

    assert product(7, 4) == pytest.approx(product(103, 100), rel=1e-12)
    assert abs(product(7, 4) - product(7, 5)) > 1e-3
    # Feature i and feature i + 4 are the complex number that position 3 turns.
    angles = 3 * 100.0 ** (-np.arange(4) / 4)
    turned = (q[0, 0, 0, :4] + 1j * q[0, 0, 0, 4:]) * np.exp(1j * angles)
    got = rotary(q, np.array([3]))[0, 0, 0]
    np.testing.assert_allclose(got[:4] + 1j * got[4:], turned, atol=1e-14)


def test_rotary_backward_is_its_transpose_at_any_positions():
    rotary = nn.RotaryEmbedding(4)
    x, grad = normal(2, 3, 2, 4), normal(2, 3, 2, 4, seed=1)
    positions = np.array([5, 0, 9])
    y = rotary(x, positions)
    assert (y * grad).sum() == pytest.approx((x * rotary.backward(grad)).sum(), rel=1e-12)
    np.testing.assert_array_equal(rotary(x), rotary(x, np.arange(3)))


def test_bad_arguments_name_themselves():
    with pytest.raises(ValueError, match="features is 8, which does not divide by 3 heads"):
        nn.MultiHeadAttention(8, 3, rng=rng())
    with pytest.raises(ValueError, match="heads is 4, which does not divide by 3 kv_heads"):
        nn.MultiHeadAttention(8, 4, 3, rng=rng())
    with pytest.raises(ValueError, match=r"head_dim must be even.*got 3"):
        nn.MultiHeadAttention(6, 2, rng=rng())
    with pytest.raises(ValueError, match="base must be above 0, got -1"):
        nn.RotaryEmbedding(4, -1)
    with pytest.raises(ValueError, match=r"shape \(batch, length, features\), got \[2, 8\]"):
        nn.MultiHeadAttention(8, 2, rng=rng())(np.ones((2, 8), "f4"))
    with pytest.raises(ValueError, match=r"positions must be an array of shape \[3\], got \[2\]"):
        nn.RotaryEmbedding(4)(np.ones((1, 3, 1, 4)), np.arange(2))
    core, q = nn.DotProductAttention(), np.ones((1, 3, 3, 4))
    with pytest.raises(ValueError, match="q has 3 heads, which do not divide by the 2 of k"):
        core(q, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ValueError, match=r"v must have the shape of k, \[1, 3, 3, 4\], got"):
        core(q, q, q[..., :2])
    with pytest.raises(ValueError, match=r"q must be \(1, 2, heads, 4\).*got \[1, 3, 3, 4\]"):
        core(q, q[:, :2], q[:, :2])
    with pytest.raises(TypeError, match="k must hold floats, got int64"):
        core(q, q.astype("i8"), q)
    with pytest.raises(TypeError, match=r"RMSNorm has parameters of float32, got .* float64"):
        nn.RMSNorm(4)(np.ones((1, 4)))
