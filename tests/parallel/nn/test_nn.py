"""Layers: gradients against finite differences, saved contexts, hooks, state."""

import gc
import weakref

import numpy as np
import pytest

from parallel import nn
from parallel.nn import Parameter
from tests.support.parallel.finite_differences import numeric


def rng(seed=0):
    return np.random.default_rng(seed)


def repr_of(layer):
    return type(layer).__name__


LAYERS = {
    "linear": (lambda: nn.Linear(3, 4, rng=rng(), dtype="f8"), (5, 3)),
    "linear_3d": (lambda: nn.Linear(3, 4, rng=rng(), dtype="f8"), (2, 5, 3)),
    "linear_1d": (lambda: nn.Linear(3, 4, rng=rng(), dtype="f8"), (3,)),
    "linear_no_bias": (lambda: nn.Linear(3, 4, False, rng=rng(), dtype="f8"), (5, 3)),
    "relu": (nn.ReLU, (4, 3)),
    "gelu": (nn.GELU, (4, 3)),
    "tanh": (nn.Tanh, (4, 3)),
    "sigmoid": (nn.Sigmoid, (4, 3)),
    "layer_norm": (lambda: nn.LayerNorm(6, dtype="f8"), (2, 3, 6)),
    "rms_norm": (lambda: nn.RMSNorm(6, dtype="f8"), (2, 3, 6)),
    "residual": (
        lambda: nn.Residual(nn.RMSNorm(3, dtype="f8"), nn.Linear(3, 3, rng=rng(), dtype="f8")),
        (4, 3),
    ),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(3, 5, rng=rng(), dtype="f8"),
            nn.GELU(),
            nn.LayerNorm(5, dtype="f8"),
            nn.Linear(5, 2, rng=rng(1), dtype="f8"),
        ),
        (4, 3),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_match_finite_differences(name):
    make, shape = LAYERS[name]
    layer = make()
    if name == "layer_norm":
        layer.weight.data[:] = rng(3).normal(size=6)
        layer.bias.data[:] = rng(4).normal(size=6)
    x = rng(1).normal(size=shape)
    weights = rng(2).normal(size=layer(x).shape)
    input_grad = layer.backward(weights)
    layer.eval()
    np.testing.assert_allclose(input_grad, numeric(lambda: layer(x), x, weights), atol=1e-8)
    for path, parameter in layer.named_parameters():
        expected = numeric(lambda: layer(x), parameter.data, weights)
        np.testing.assert_allclose(parameter.grad, expected, atol=1e-8, err_msg=path)


def test_embedding_adds_the_gradients_of_repeated_indices():
    layer = nn.Embedding(5, 3, rng=rng(), dtype="f8")
    indices = np.array([[1, 4], [1, 1]])
    weights = rng(2).normal(size=(2, 2, 3))
    layer(indices)
    layer.backward(weights)
    layer.eval()
    expected = numeric(lambda: layer(indices), layer.weight.data, weights)
    np.testing.assert_allclose(layer.weight.grad, expected, atol=1e-8)
    with pytest.raises(IndexError, match=r"\[0, 5\), got 0 to 5"):
        layer(np.array([0, 5]))
    with pytest.raises(TypeError, match="float64"):
        layer(np.array([0.0]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy(reduction, smoothing):
    loss = nn.CrossEntropyLoss(reduction, label_smoothing=smoothing)
    logits, targets = rng().normal(size=(2, 3, 4)), np.array([[0, 3, 1], [1, 1, 2]])
    value = loss(logits, targets)
    grad = loss.backward()
    soft = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.eye(4)[targets] * (1 - smoothing) + smoothing / 4
    by_hand = -(wanted * np.log(soft)).sum() / (6 if reduction == "mean" else 1)
    assert value == pytest.approx(by_hand, abs=1e-12)
    loss.eval()
    expected = numeric(lambda: np.array(loss(logits, targets)), logits, 1.0)
    np.testing.assert_allclose(grad, expected, atol=1e-8)


def test_cross_entropy_survives_large_logits_and_refuses_bad_targets():
    loss = nn.CrossEntropyLoss()
    assert loss(np.array([[1000.0, 0.0]]), np.array([0])) == 0
    with pytest.raises(ValueError, match=r"\[0, 2\), got 0 to 2"):
        loss(np.zeros((2, 2)), np.array([0, 2]))
    with pytest.raises(ValueError, match=r"shape \[2\], got int64\[3\]"):
        loss(np.zeros((2, 2)), np.array([0, 1, 1]))


def test_dropout_scales_what_it_keeps_and_is_off_in_evaluation():
    layer = nn.Dropout(0.25, rng=rng())
    x = np.ones((100, 100))
    y = layer(x)
    assert set(np.unique(y)) == {0.0, 1 / 0.75}
    assert 0.7 < (y > 0).mean() < 0.8
    np.testing.assert_array_equal(layer.backward(x), y)
    assert layer.eval()(x) is x


def test_backward_twice_without_forward_is_an_error():
    layer = nn.Linear(2, 2, rng=rng())
    layer(np.ones((1, 2), "f4"))
    layer.backward(np.ones((1, 2), "f4"))
    with pytest.raises(RuntimeError, match=r"Linear\.backward was called without a matching"):
        layer.backward(np.ones((1, 2), "f4"))
    layer.eval()(np.ones((1, 2), "f4"))
    with pytest.raises(RuntimeError, match="evaluation mode"):
        layer.backward(np.ones((1, 2), "f4"))


def test_outstanding_forwards_run_backward_last_in_first_out():
    layer = nn.Linear(2, 3, bias=False, rng=rng(), dtype="f8")
    first, second = rng(1).normal(size=(1, 2)), rng(2).normal(size=(1, 2))
    grad = np.ones((1, 3))
    layer(first)
    layer(second)
    layer.backward(grad)
    np.testing.assert_allclose(layer.weight.grad, grad.T @ second)
    layer.backward(grad)
    np.testing.assert_allclose(layer.weight.grad, grad.T @ (first + second))


@pytest.mark.parametrize(
    "wrap", [lambda layer: layer, lambda layer: nn.ComputeIn(layer, "f4")], ids=["plain", "cast"]
)
def test_a_first_layer_leaves_its_input_s_gradient_out(wrap):
    def train(input_grad):
        first = nn.Linear(3, 4, rng=rng(), dtype="f8")
        first.input_grad = input_grad
        model = wrap(nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2, rng=rng(1), dtype="f8")))
        grad = model.backward(model(np.ones((5, 3))))
        return grad, [parameter.grad for parameter in model.parameters()]

    grad, wanted = train(True)
    assert grad.shape == (5, 3)
    without, got = train(False)
    assert without is None
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_contexts_can_be_set_aside_for_another_order():
    layer = nn.Sequential(nn.Linear(2, 3, bias=False, rng=rng(), dtype="f8"))
    first, second = rng(1).normal(size=(1, 2)), rng(2).normal(size=(1, 2))
    grad = np.ones((1, 3))
    layer(first)
    aside = layer.take_saved()
    layer(second)
    later = layer.take_saved()
    layer.put_saved(aside)
    layer.backward(grad)
    (weight,) = layer.parameters()
    np.testing.assert_allclose(weight.grad, grad.T @ first)
    layer.put_saved(later)
    layer.backward(grad)
    np.testing.assert_allclose(weight.grad, grad.T @ (first + second))


def test_hook_of_a_shared_parameter_fires_once_when_its_gradient_is_complete():
    shared = nn.Linear(3, 3, rng=rng(), dtype="f8")
    model = nn.Sequential(shared, nn.Tanh(), shared)
    seen = []
    handle = shared.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.copy()))
    x, weights = rng(1).normal(size=(4, 3)), rng(2).normal(size=(4, 3))
    model(x)
    model.backward(weights)
    model.eval()
    assert len(seen) == 1
    expected = numeric(lambda: model(x), shared.weight.data, weights)
    np.testing.assert_allclose(seen[0], expected, atol=1e-8)
    handle.remove()
    handle.remove()
    model.train()(x)
    model.backward(weights)
    assert len(seen) == 1


def test_hook_waits_for_all_outstanding_forwards_and_discarding_forgets_them():
    layer = nn.Linear(2, 2, rng=rng(), dtype="f8")
    seen = []
    layer.bias.register_post_accumulate_grad_hook(seen.append)
    x = np.ones((1, 2))
    layer(x)
    layer(x)
    layer.backward(x)
    assert not seen
    layer.backward(x)
    assert seen == [layer.bias]
    layer(x)
    layer.discard_saved()
    assert layer.outstanding == layer.bias.uses == 0
    layer(x)
    layer.backward(x)
    assert len(seen) == 2


def test_gradient_home_is_written_in_place():
    layer = nn.Linear(2, 3, rng=rng(), dtype="f8")
    buffer = np.full(9, np.nan)
    layer.weight.set_grad_home(buffer[:6].reshape(3, 2))
    layer.bias.set_grad_home(buffer[6:])
    x, grad = rng(1).normal(size=(4, 2)), rng(2).normal(size=(4, 3))
    for times in (1, 2):
        layer(x)
        layer.backward(grad)
        np.testing.assert_allclose(buffer[:6].reshape(3, 2), times * grad.T @ x)
        np.testing.assert_allclose(buffer[6:], times * grad.sum(0))
    layer.zero_grad()
    layer(x)
    layer.backward(grad)
    assert np.shares_memory(layer.weight.grad, buffer)
    np.testing.assert_allclose(layer.weight.grad, grad.T @ x)
    layer.weight.set_grad_home(None)
    assert not np.shares_memory(layer.weight.grad, buffer)


def test_frozen_parameters_get_no_gradient_and_fire_no_hook():
    layer = nn.Linear(2, 2, rng=rng(), dtype="f8")
    layer.weight.requires_grad = False
    layer.weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("frozen"))
    layer(np.ones((1, 2)))
    layer.backward(np.ones((1, 2)))
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_wrong_gradients_are_refused():
    parameter = Parameter(np.zeros((2, 3)), name="w")
    with pytest.raises(ValueError, match=r"w: float64\[2, 3\].*got float32\[2, 3\]"):
        parameter.accumulate_grad(np.zeros((2, 3), "f4"))
    with pytest.raises(RuntimeError, match="without a use in forward"):
        parameter.accumulate_grad(np.zeros((2, 3)))
    with pytest.raises(TypeError, match="list"):
        Parameter([1.0])


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 3, rng=rng())
        self.mean = nn.Buffer(np.zeros(2, "f4"))
        self.scratch = nn.Buffer(np.zeros(1, "f4"), persistent=False)
        self.tied = self.inner


def test_names_states_and_modes():
    model = nn.Sequential(WithBuffer(), nn.ReLU())
    assert [path for path, _ in model.named_parameters()] == ["0.inner.weight", "0.inner.bias"]
    assert [path for path, _ in model.named_buffers()] == ["0.mean", "0.scratch"]
    assert [path for path, _ in model.named_modules()] == ["", "0", "0.inner", "1"]
    state = {path: array + 1 for path, array in model.state_dict().items()}
    assert sorted(state) == ["0.inner.bias", "0.inner.weight", "0.mean"]
    model.load_state_dict(state)
    np.testing.assert_array_equal(model[0].mean.data, 1)
    assert not model.eval()[0].inner.training
    with pytest.raises(KeyError, match=r"missing \['0.mean'\], unexpected \['x'\]"):
        model.load_state_dict({**{k: v for k, v in state.items() if k != "0.mean"}, "x": 0})
    with pytest.raises(ValueError, match=r"'0.mean'\] must have shape \[2\], got \[3\]"):
        model.load_state_dict({**state, "0.mean": np.zeros(3)})
    assert model.map_arrays(lambda a: a.astype("f8"))[0].inner.weight.data.dtype == np.float64


def test_bad_arguments_name_themselves():
    with pytest.raises(ValueError, match="out_features must be at least 1, got 0"):
        nn.Linear(3, 0, rng=rng())
    with pytest.raises(ValueError, match=r"\(\.\.\., 3\), got \[2, 4\]"):
        nn.Linear(3, 2, rng=rng())(np.zeros((2, 4), "f4"))
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\), got 1"):
        nn.Dropout(1, rng=rng())
    with pytest.raises(ValueError, match="reduction"):
        nn.CrossEntropyLoss("none")


def test_without_a_generator_numpys_global_state_decides():
    """As torch's layers begin: seeded alike they are alike, and no two of one seed are."""

    def draw():
        np.random.seed(7)
        layers = nn.Linear(3, 2), nn.Linear(3, 2), nn.Embedding(2, 3, dtype="f8")
        values = [layer.weight.data for layer in layers]
        return [*values, nn.Dropout()(np.ones((8, 8)))]

    first, second = draw(), draw()
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first[0], first[1])
    assert first[2].dtype == np.float64
    assert not np.array_equal(nn.Linear(3, 2).weight.data, first[0])
    with pytest.raises(TypeError, match="rng must be a Generator"):
        nn.Linear(3, 2, rng=7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_mse_loss_and_its_gradient(reduction):
    loss = nn.MSELoss(reduction)
    x, targets = rng(0).normal(size=(4, 3)), rng(1).normal(size=(4, 3))
    found = loss(x, targets)
    total = ((x - targets) ** 2).sum()
    np.testing.assert_allclose(found, total / (12 if reduction == "mean" else 1))
    grad = loss.backward(3.0)
    loss.eval()
    expected = numeric(lambda: np.array(loss(x, targets)), x, np.array(3.0))
    np.testing.assert_allclose(grad, expected, rtol=1e-6)
    single = loss.train()(x.astype("f4"), targets)
    np.testing.assert_allclose(single, found, rtol=1e-5)
    assert loss.backward().dtype == np.float32


def test_mse_loss_refuses_what_it_cannot_compare():
    loss = nn.MSELoss()
    with pytest.raises(ValueError, match=r"float64\[4, 1\] and targets float64\[4\]"):
        loss(np.ones((4, 1)), np.ones(4))
    with pytest.raises(ValueError, match="expected floating predictions"):
        loss(np.ones(4, int), np.ones(4, int))
    with pytest.raises(ValueError, match="predictions is empty"):
        loss(np.ones((0, 4)), np.ones((0, 4)))
    with pytest.raises(ValueError, match="reduction must be"):
        nn.MSELoss("none")
    with pytest.raises(TypeError, match="targets"):
        loss(np.ones(4), [1.0] * 4)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
@pytest.mark.parametrize("layer", [nn.Linear(3, 2, rng=rng()), nn.LayerNorm(3)], ids=repr_of)
def test_an_input_whose_gradient_would_not_fit_is_refused_in_forward(layer, dtype):
    with pytest.raises(TypeError) as caught:
        layer(np.ones((5, 3), dtype))
    text = str(caught.value)
    assert text.startswith(type(layer).__name__)
    assert f"input x of {dtype}[5, 3]" in text
    assert "float32" in text


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layer", [nn.Linear(3, 2, rng=rng()), nn.LayerNorm(3)], ids=repr_of)
def test_an_input_that_the_parameters_can_learn_from_is_taken(layer, dtype):
    layer.backward(np.ones_like(layer(np.ones((5, 3), dtype))))
    assert layer.weight.grad.dtype == np.float32


def test_a_layer_in_lower_precision_takes_what_it_is_given():
    layer = nn.ComputeIn(nn.Linear(3, 2, rng=rng()), "float16")
    layer.backward(np.ones_like(layer(np.ones((5, 3), "float64"))))
    assert layer.module.weight.grad.dtype == np.float32


def test_a_hook_goes_with_its_parameter_and_not_only_with_the_garbage():
    class Kept:
        pass

    kept = Kept()
    gone = weakref.ref(kept)
    parameter = nn.Parameter(np.ones(2))
    handle = parameter.register_post_accumulate_grad_hook(lambda _, kept=kept: None)
    gc.disable()
    try:
        del parameter, handle, kept
        assert gone() is None
    finally:
        gc.enable()
