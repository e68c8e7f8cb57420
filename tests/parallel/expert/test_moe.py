"""One process: the layer against a loop over all experts, and its derivatives."""

import re

import numpy as np
import pytest

from parallel import nn
from parallel.expert import Dispatch, GroupedLinear, MoE, Router, load_balance
from tests.support.parallel.moe_models import DIM, EXPERTS, dense, make_moe, tokens

KINDS = {
    "softmax": {},
    "switch": {"top_k": 1},
    "sigmoid": {"score": "sigmoid"},
    "not normalized": {"normalize": False},
    "normalized one": {"top_k": 1, "normalize": True, "score": "sigmoid"},
    "all": {"top_k": EXPERTS},
    "shared": {"shared": True, "top_k": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_a_loop_over_the_experts(kind):
    layer = make_moe(balance_weight=0.1, **KINDS[kind])
    x = tokens(0)
    expected, balance = dense(layer, x)
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-13)
    assert layer.router.balance_loss == pytest.approx(balance, abs=1e-13)
    assert layer.router.load.sum() == len(x) * layer.router.top_k
    assert layer.dropped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_backward_is_the_derivative(kind):
    """Central differences in float64 of y·v plus the balance loss, in random directions."""
    layer = make_moe(balance_weight=0.3, **KINDS[kind])
    x, rng = tokens(0), np.random.default_rng(1)
    v = rng.normal(size=x.shape)

    def value(x):
        y = layer(x)
        return float((y * v).sum()) + 0.3 * layer.router.balance_loss

    layer.train()
    layer(x)
    input_grad = layer.backward(v)
    layer.eval()

    def check(array, grad):
        for _ in range(3):
            direction = rng.normal(size=array.shape)
            step = 1e-6 * direction
            array += step
            above = value(x)
            array -= 2 * step
            below = value(x)
            array += step
            assert (above - below) / 2e-6 == pytest.approx((grad * direction).sum(), abs=2e-6)

    check(x, input_grad)
    for parameter in layer.parameters():
        check(parameter.data, parameter.grad)


def test_several_forward_passes_may_be_outstanding():
    one, two = make_moe(), make_moe()
    first, second = tokens(0), tokens(1)
    grads = {}
    for x in (second, first):
        one(x)
        grads[id(x)] = one.backward(x)
    two(first)
    two(second)
    assert np.array_equal(two.backward(second), grads[id(second)])
    assert np.array_equal(two.backward(first), grads[id(first)])
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert np.array_equal(a.grad, b.grad)
        assert not b.uses


def test_shapes_and_no_tokens():
    layer = make_moe(balance_weight=0.1)
    x = tokens(0)
    np.testing.assert_array_equal(layer(x.reshape(2, 3, 4, DIM)).reshape(x.shape), layer(x))
    layer.discard_saved()
    assert layer(x[:0]).shape == (0, DIM)
    assert layer.backward(x[:0]).shape == (0, DIM)
    assert all(not p.grad.any() for p in layer.parameters())


def test_capacity_takes_first_choices_then_first_tokens():
    experts = np.array([[0, 1], [0, 1], [1, 0], [0, 2]])
    plan = Dispatch(experts, 3, capacity=2)
    # Choices are choice * 4 + token: expert 0 takes tokens 0 and 1, expert 1 token 2's first choice
    # and token 0's second one.
    assert plan.rows.tolist() == [0, 1, 2, 4, 7]
    assert plan.counts == [2, 2, 1]
    assert plan.dropped == 3
    assert Dispatch(experts, 3).counts == [4, 3, 1]


def test_dropped_choices_count_as_zero_in_both_directions():
    x = tokens(0)
    layer = make_moe(top_k=2, capacity_factor=0.5)
    y = layer(x)
    assert 0 < layer.dropped < 2 * len(x)
    assert layer.dropped == (np.maximum(layer.router.load - 6, 0)).sum()  # 0.5 * 2 * 24 / 4
    weights, chosen = make_moe().router.eval()(x)
    gone = [token for token in range(len(x)) if not y[token].any()]
    layer.backward(
        np.eye(len(x), DIM)[gone[0]] * np.ones_like(x) * (np.arange(len(x)) == gone[0])[:, None]
    )
    assert weights[gone[0]].all()
    assert all(not p.grad.any() for p in layer.experts.parameters())
    assert chosen.shape == (24, 2)


def test_balance_is_1_where_all_are_equally_busy_and_n_where_one_has_all():
    even = np.full((8, 4), 0.25)
    assert load_balance(np.full(4, 2), even)[0] == pytest.approx(1)
    one = np.eye(4)[np.zeros(8, int)]
    assert load_balance(np.array([8, 0, 0, 0]), one)[0] == pytest.approx(4)


def test_equal_scores_choose_the_first_experts():
    router = Router(3, 4, 2, rng=np.random.default_rng(0), dtype="f8")
    _, chosen = router(np.zeros((2, 3)))
    assert chosen.tolist() == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"top_k": 5}, ValueError, "top_k is 5; expected at most the number of experts, 4"),
        ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
        ({"score": "relu"}, ValueError, "score must be 'softmax' or 'sigmoid', got 'relu'"),
        ({"capacity_factor": 0}, ValueError, "capacity_factor must be positive, got 0"),
        ({"capacity_factor": "1"}, TypeError, "capacity_factor must be a number, got '1'"),
        ({"balance_weight": -1}, ValueError, "balance_weight must be at least 0, got -1"),
        ({"activation": int}, TypeError, "activation() must be a Module"),
        ({"experts": 2.5}, TypeError, "experts must be"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make_moe(**options)


def test_bad_input():
    layer = make_moe()
    with pytest.raises(
        ValueError, match=r"Router expects an input of shape \(..., 6\), got \[2, 5\]"
    ):
        layer(np.zeros((2, 5)))
    with pytest.raises(TypeError, match="has parameters of float64, got an input x of complex128"):
        layer(np.zeros((2, 6), complex))
    with pytest.raises(TypeError, match="expects an input"):
        layer(3)
    with pytest.raises(
        ValueError, match=r"counts must be 2 numbers that sum to the 3 rows, got \[1, 1\]"
    ):
        GroupedLinear(np.zeros((4, 2, 3)))(np.zeros((3, 3)), [1, 1])
    with pytest.raises(TypeError, match="shared must be a Module"):
        MoE(4, 4, 2, 1, shared=nn.GELU, rng=np.random.default_rng(0))
