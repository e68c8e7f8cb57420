"""Sharded modules that compute or reduce in other dtypes."""

import numpy as np
import pytest

import meshlib as dist
from parallel import nn
from parallel.fsdp import MixedPrecisionPolicy, fully_shard
from tests.support.parallel.fsdp_training import (
    assert_equal,
    backward,
    expected_gradients,
    gradients,
    make_mlp,
    mlp_batch,
    on_mesh,
    shard,
)


def test_mixed_precision():
    dtypes = []

    class Spy(nn.Module):
        def forward(self, x):
            dtypes.append(x.dtype.name)
            return x

        def backward(self, grad):
            dtypes.append(grad.dtype.name)
            return grad

    def program(mesh):
        rng = np.random.default_rng(0)
        model = nn.Sequential(
            nn.Linear(6, 8, rng=rng), nn.LayerNorm(8), Spy(), nn.Linear(8, 3, rng=rng)
        )
        policy = MixedPrecisionPolicy("float16", "float32", "float64")
        fully_shard(model, mesh, mp_policy=policy)
        x, y = mlp_batch(0, dist.get_rank(), 2)
        loss = nn.CrossEntropyLoss()
        out = model(x.astype("f4"))
        assert out.dtype == np.float64
        loss(out, y)
        assert model.backward(loss.backward()).dtype == np.float32
        assert {p.grad.dtype.name for p in model.parameters()} == {"float32"}
        assert {p.data.dtype.name for p in model.parameters()} == {"float32"}
        return gradients(model)

    got = on_mesh(program, 2)[0]
    assert set(dtypes) == {"float16"}
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(6, 8, rng=rng), nn.LayerNorm(8), nn.Linear(8, 3, rng=rng))
    x, y = mlp_batch(0)
    loss = nn.CrossEntropyLoss()
    loss(model(x.astype("f4")), y)
    model.backward(loss.backward())
    for (path, value), expected in zip(got.items(), gradients(model).values(), strict=True):
        np.testing.assert_allclose(value, expected, atol=3e-3, err_msg=path)
        assert np.abs(value - expected).max() > 0


def test_gradients_are_reduced_in_the_dtype_that_was_asked_for():
    def program(mesh):
        model = shard(make_mlp(), mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype="float32"))
        backward(model, dist.get_rank(), 2)
        return gradients(model)

    for got in on_mesh(program, 2):
        expected = expected_gradients()
        assert_equal(got, expected, 1e-6)
        assert any(np.abs(got[path] - expected[path]).max() > 1e-12 for path in got)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parts_of_layers_in_another_precision(dtype):
    pytest.importorskip("ml_dtypes")

    def program(mesh):
        rng = np.random.default_rng(0)
        model = nn.Sequential(nn.ComputeIn(nn.Linear(6, 8, rng=rng), dtype), nn.LayerNorm(8))
        shard(model, mesh)
        for _ in range(2):
            model.backward(model(np.ones((2, 6), np.float32)))
        return {p.grad.dtype.name for p in model.parameters()}

    assert on_mesh(program, 2) == [{"float32"}] * 2
