"""Optimizers: their formulas by hand, groups, and exact resume."""

import numpy as np
import pytest

from parallel.nn import Parameter
from parallel.optim import SGD, Adam, AdamW
from parallel.optim._optimizer import in_blocks

GRADS = [0.5, -1.0, 0.25, 2.0]


def run(make, start=3.0):
    parameter = Parameter(np.array([start]))
    optimizer = make([parameter])
    for grad in GRADS:
        parameter.grad = np.array([grad])
        optimizer.step()
    return parameter.data[0]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_with_momentum(nesterov, weight_decay):
    p, v = 3.0, None
    for grad in GRADS:
        g = grad + weight_decay * p
        v = g if v is None else 0.9 * v + g
        p -= 0.1 * (g + 0.9 * v if nesterov else v)
    got = run(lambda ps: SGD(ps, 0.1, 0.9, weight_decay=weight_decay, nesterov=nesterov))
    assert got == pytest.approx(p, abs=1e-14)


def test_sgd_with_dampening_and_plain():
    assert run(lambda ps: SGD(ps, 0.1)) == pytest.approx(3 - 0.1 * sum(GRADS), abs=1e-14)
    p, v = 3.0, None
    for g in GRADS:
        v = g if v is None else 0.9 * v + 0.75 * g
        p -= 0.1 * v
    assert run(lambda ps: SGD(ps, 0.1, 0.9, 0.25)) == pytest.approx(p, abs=1e-14)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_and_adamw(decoupled):
    p, m, v = 3.0, 0.0, 0.0
    for t, grad in enumerate(GRADS, 1):
        g = grad if decoupled else grad + 0.1 * p
        if decoupled:
            p -= 0.01 * 0.1 * p
        m = 0.8 * m + 0.2 * g
        v = 0.95 * v + 0.05 * g * g
        p -= 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)) ** 0.5 + 1e-6)
    kind = AdamW if decoupled else Adam
    got = run(lambda ps: kind(ps, 0.01, (0.8, 0.95), 1e-6, weight_decay=0.1))
    assert got == pytest.approx(p, abs=1e-14)


@pytest.mark.parametrize(
    "make", [lambda ps: SGD(ps, 0.1, 0.9), lambda ps: AdamW(ps, 0.1)], ids=["SGD", "AdamW"]
)
def test_resume_is_exact(make):
    def step(parameter, optimizer, seed):
        parameter.grad = np.random.default_rng(seed).normal(size=3)
        optimizer.step()

    whole = Parameter(np.arange(3.0))
    first = make([whole])
    for seed in range(3):
        step(whole, first, seed)
    resumed = Parameter(whole.data.copy())
    second = make([resumed])
    second.load_state_dict(first.state_dict())
    for seed in range(3, 6):
        step(whole, first, seed)
        step(resumed, second, seed)
    np.testing.assert_array_equal(whole.data, resumed.data)


def test_groups_have_their_own_options_and_missing_gradients_are_skipped():
    a, b, c = (Parameter(np.ones(1)) for _ in range(3))
    optimizer = SGD([{"params": [a]}, {"params": [b, c], "lr": 1.0}], lr=0.1)
    a.grad, b.grad = np.ones(1), np.ones(1)
    optimizer.step()
    assert (a.data[0], b.data[0], c.data[0]) == (0.9, 0.0, 1.0)
    optimizer.zero_grad()
    assert a.grad is None


def test_bad_arguments():
    p = Parameter(np.ones(1))
    with pytest.raises(ValueError, match="empty"):
        SGD([])
    with pytest.raises(ValueError, match="lr must be at least 0, got -1"):
        SGD([p], lr=-1)
    with pytest.raises(ValueError, match="nesterov requires momentum"):
        SGD([p], nesterov=True)
    with pytest.raises(ValueError, match="betas"):
        Adam([p], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="twice"):
        SGD([p, p])
    with pytest.raises(ValueError, match=r"\['learning_rate'\] are unknown"):
        SGD([{"params": [p], "learning_rate": 1}])
    with pytest.raises(TypeError, match="ndarray"):
        SGD([p, np.ones(1)])
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters, but this .* of \[2\]"):
        SGD([p, Parameter(np.ones(1))]).load_state_dict(SGD([p]).state_dict())


LARGE = (3, 100_001)


def test_blocks_are_the_whole_in_order() -> None:
    whole = np.arange(np.prod(LARGE)).reshape(LARGE), np.zeros(LARGE)
    blocks = list(in_blocks(*whole))
    assert len(blocks) > 1
    assert np.array_equal(np.concatenate([first for first, _ in blocks]), whole[0].reshape(-1))
    for _, second in blocks:
        second.fill(1)
    assert np.all(whole[1] == 1)


def test_small_or_scattered_arrays_come_at_once() -> None:
    small, scattered = np.zeros((2, 3)), np.zeros(LARGE[::-1]).T
    assert [id(each) for (each,) in in_blocks(small)] == [id(small)]
    assert len(list(in_blocks(np.zeros(LARGE), scattered))) == 1


def test_a_gradient_that_only_broadcasts_moves_the_whole_parameter() -> None:
    moved, whole = (Parameter(np.ones((2, *LARGE))) for _ in range(2))
    moved.grad, whole.grad = np.ones(LARGE), np.ones((2, *LARGE))
    SGD([moved, whole], 0.5, 0.9).step()
    assert np.array_equal(moved.data, whole.data)


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: SGD(ps, 0.1, weight_decay=0.1),
        lambda ps: SGD(ps, 0.1, 0.9, 0.25),
        lambda ps: SGD(ps, 0.1, 0.9, weight_decay=0.1, nesterov=True),
        lambda ps: Adam(ps, 0.1, weight_decay=0.1),
        lambda ps: AdamW(ps, 0.1),
    ],
)
def test_large_arrays_move_as_small_ones_do(make) -> None:
    """Bit by bit, whether their bytes lie in one piece (blocks) or not (whole)."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(LARGE).astype(np.float32)
    in_one_piece, scattered = Parameter(start.copy()), Parameter(start.T.copy().T)
    rows = [Parameter(row.copy()) for row in start]
    optimizer = make([in_one_piece, scattered, *rows])
    for _ in range(3):
        grad = rng.standard_normal(LARGE).astype(np.float32)
        in_one_piece.grad, scattered.grad = grad.copy(), grad.T.copy().T
        for parameter, part in zip(rows, grad, strict=True):
            parameter.grad = part.copy()
        optimizer.step()
    assert in_one_piece.data.tobytes() == scattered.data.tobytes()
    assert in_one_piece.data.tobytes() == np.stack([row.data for row in rows]).tobytes()
    assert in_one_piece.data.tobytes() != start.tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: SGD(ps, 0.1),
        lambda ps: SGD(ps, 0.1, 0.9),
        lambda ps: SGD(ps, 0.1, 0.9, weight_decay=0.1, nesterov=True),
        lambda ps: Adam(ps, 0.1, weight_decay=0.1),
        lambda ps: AdamW(ps, 0.1),
    ],
)
@pytest.mark.parametrize("form", [np.float64, np.array], ids=["scalar", "0-d"])
def test_a_parameter_without_dims_is_trained_as_one_of_one_element_is(make, form):
    parameter = Parameter(form(3.0))
    optimizer = make([parameter])
    for grad in GRADS:
        parameter.grad = form(grad)
        optimizer.step()
        parameter.data = parameter.data * 1.0  # a scalar again: what users compute of it is one
    assert float(parameter.data) == run(make)
