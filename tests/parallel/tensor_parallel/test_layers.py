"""Tensor-parallel layers: equal to the whole layers, forward, backward and in training."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.sharding import Replicate
from meshlib.testing import run_ranks
from parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    nn,
    optim,
    parallelize,
)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 5, 6)])
def test_colwise_is_a_block_of_the_whole_layer(whole, bias, shape):
    linear = nn.Linear(6, 8, bias, rng=rng(), dtype="f8")
    x, grad = rng(1).normal(size=shape), rng(2).normal(size=(*shape[:-1], 8))
    y = linear(x)
    input_grad = linear.backward(grad)

    layout = Replicate() if whole else None

    def job():
        block = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
        layer = nn.Linear(6, 8, bias, rng=rng(), dtype="f8")
        parallelize(layer, None, {"": ColwiseParallel(output_layouts=layout)})
        np.testing.assert_allclose(layer(x), y if whole else y[..., block], atol=1e-14)
        got = layer.backward(grad if whole else grad[..., block])
        np.testing.assert_allclose(got, input_grad, atol=1e-13)
        np.testing.assert_allclose(layer.weight.grad, linear.weight.grad[block], atol=1e-14)
        if bias:
            np.testing.assert_allclose(layer.bias.grad, linear.bias.grad[block], atol=1e-14)

    run_ranks(job, 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8)])
def test_rowwise_is_the_whole_layer(parallel, bias, shape):
    linear = nn.Linear(8, 6, bias, rng=rng(), dtype="f8")
    x, grad = rng(1).normal(size=shape), rng(2).normal(size=(*shape[:-1], 6))
    y = linear(x)
    input_grad = linear.backward(grad)

    def job():
        block = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
        layer = nn.Linear(8, 6, bias, rng=rng(), dtype="f8")
        style = RowwiseParallel(input_layouts=None if parallel else Replicate())
        parallelize(layer, None, {"": style})
        np.testing.assert_allclose(layer(x[..., block] if parallel else x), y, atol=1e-14)
        expected = input_grad[..., block] if parallel else input_grad
        np.testing.assert_allclose(layer.backward(grad), expected, atol=1e-13)
        weight_grad = linear.weight.grad[:, block]
        np.testing.assert_allclose(layer.weight.grad, weight_grad, atol=1e-14)
        if bias:
            np.testing.assert_allclose(layer.bias.grad, linear.bias.grad, atol=1e-14)

    run_ranks(job, 2)


def make_model(tp=None):
    generator = rng()
    options = {"rng": generator, "dtype": "f8"}
    model = nn.Sequential(
        nn.Linear(6, 16, **options),
        nn.GELU(),
        nn.Linear(16, 6, **options),
        nn.LayerNorm(6, dtype="f8"),
        nn.Linear(6, 4, **options),
    )
    if tp is not None:
        parallelize(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def train(model, rank=0, replicas=1, steps=50):
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    for step in range(steps):
        x, y = rng(step).normal(size=(12, 6)), rng(step).integers(0, 4, 12)
        optimizer.zero_grad()
        loss(model(x[rank::replicas]), y[rank::replicas])
        model.backward(loss.backward())
        optimizer.step()
    return model


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (1, 4)])
def test_training_over_a_mesh_equals_one_process(dp, tp):
    def job():
        mesh = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = DistributedDataParallel(make_model(mesh["tp"]), mesh["dp"])
        train(model, mesh.get_local_rank("dp"), dp)
        state = model.module.state_dict()
        return {
            path: value.full_array() if isinstance(value, dist.DArray) else value
            for path, value in state.items()
        }

    expected = train(make_model()).state_dict()
    for got in run_ranks(job, dp * tp):
        assert got.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_allclose(got[path], value, rtol=0, atol=1e-12, err_msg=path)


def test_replicated_values_are_the_same_bits_on_all_ranks():
    def job():
        x = rng(1).normal(size=(5, 6)).astype("f4")
        layers = nn.Linear(6, 9, rng=rng()), nn.ReLU(), nn.Linear(9, 6, rng=rng(1))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize(nn.Sequential(*layers), None, plan)
        return model(x).tobytes(), model.backward(x).tobytes()

    assert len(set(run_ranks(job, 3))) == 1


@pytest.mark.parametrize("bias", [True, False])
def test_shards_make_the_whole_layer_again(bias):
    linear = nn.Linear(6, 8, bias, rng=rng())

    def job():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for style in (ColwiseParallel(), RowwiseParallel()):
            layer = parallelize(nn.Linear(6, 8, bias, rng=rng()), mesh, {"": style})
            again = nn.Linear(6, 8, bias, rng=rng(1))
            again.load_state_dict(layer.state_dict())
            for path, value in linear.state_dict().items():
                np.testing.assert_array_equal(again.state_dict()[path], value)

    run_ranks(job, 2)


def test_sizes_that_do_not_divide_are_refused_with_both_numbers():
    def job():
        with pytest.raises(ValueError, match="out_features of '' is 7, which is not divisible by"):
            parallelize(nn.Linear(4, 7, rng=rng()), None, {"": ColwiseParallel()})
        with pytest.raises(ValueError, match="in_features of '' is 7, which is not divisible by"):
            parallelize(nn.Linear(7, 4, rng=rng()), None, {"": RowwiseParallel()})
        style = RowwiseParallel(input_layouts=Replicate())
        layer = parallelize(nn.Linear(8, 4, rng=rng()), None, {"": style})
        with pytest.raises(ValueError, match=r"RowParallelLinear.*\(\.\.\., 8\), got \[1, 4\]"):
            layer(np.ones((1, 4), "f4"))

    run_ranks(job, 2)
