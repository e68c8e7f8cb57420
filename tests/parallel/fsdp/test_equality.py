"""Sharded training gives what one process gives, in float64."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from tests.support.parallel.fsdp_training import MODELS, assert_equal, shard, train, whole


@pytest.fixture(scope="module")
def alone():
    """The parameters after training on one process, by model."""
    expected = {}
    for name, (make, batches) in MODELS.items():
        model = make()
        train(model, batches)
        expected[name] = whole(model.state_dict())
    return expected


RESHARD = {"default": None, "keep": False, "all": True, "half": 2}


@pytest.mark.parametrize(
    ("n", "reshard", "name"),
    [
        *[(n, reshard, name) for n in (2, 4) for reshard in RESHARD for name in MODELS],
        # Eight differ from four in how many a half are; with one model each the pairs are complete.
        (8, "half", "transformer"),
        (8, "all", "mlp"),
    ],
)
def test_fsdp(name, reshard, n, alone):
    make, batches = MODELS[name]

    def program():
        mesh = dist.init_device_mesh("cpu", (n,), mesh_dim_names=("dp_shard",))
        model = shard(make(), mesh, reshard_after_forward=RESHARD[reshard])
        train(model, batches, dist.get_rank(), n)
        return whole(model.state_dict())

    for got in run_ranks(program, n):
        assert_equal(got, alone[name])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2), (1, 2), (2, 1)])
def test_hsdp(name, shape, alone):
    make, batches = MODELS[name]
    n = shape[0] * shape[1]

    def program():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        model = shard(make(), mesh["dp_replicate", "dp_shard"])
        train(model, batches, dist.get_rank(), n)
        return whole(model.state_dict())

    for got in run_ranks(program, n):
        assert_equal(got, alone[name])


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (4, 2), (2, 4)])
def test_fsdp_with_tensor_parallel(shape, alone):
    make, batches = MODELS["transformer"]
    n = shape[0] * shape[1]

    def program():
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp_shard", "tp"))
        model = shard(make(tp=mesh["tp"]), mesh["dp_shard"])
        train(model, batches, mesh.get_local_rank("dp_shard"), shape[0])
        assert model[1][1].inner[1].weight.global_part.sharding.spec == dist.P(("tp", "dp_shard"))
        return whole(model.state_dict())

    for got in run_ranks(program, n):
        assert_equal(got, alone["transformer"])


def test_hsdp_with_tensor_parallel(alone):
    make, batches = MODELS["transformer"]

    def program():
        mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
        model = shard(make(tp=mesh["tp"]), mesh["replicate", "shard"])
        train(model, batches, dist.get_rank() // 2, 4)
        return whole(model.state_dict())

    for got in run_ranks(program, 8):
        assert_equal(got, alone["transformer"])


def test_one_group_for_the_whole_model(alone):
    from parallel.fsdp import fully_shard

    make, batches = MODELS["transformer"]

    def program():
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = fully_shard(make(), mesh)
        train(model, batches, dist.get_rank(), 2)
        return whole(model.state_dict())

    for got in run_ranks(program, 2):
        assert_equal(got, alone["transformer"])


def test_large_parameters_go_by_themselves(monkeypatch, alone):
    monkeypatch.setattr("parallel._core.shards.DIRECT_BYTES", 200)
    make, batches = MODELS["transformer"]

    def program():
        mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
        model = shard(make(), mesh)
        x, y = batches(0)
        cut = [slice(0, 5), slice(5, 10), slice(10, 15)][dist.get_rank()]
        losses = train(model, lambda *_: (x[cut], y[cut]))
        return losses, whole(model.state_dict())

    model = make()
    x, y = batches(0)
    train(model, lambda *_: (x[:15], y[:15]))
    results = run_ranks(program, 3)
    for _, got in results:
        assert_equal(got, model.state_dict())
    assert len({tuple(losses) for losses, _ in results}) == 3
    assert np.isfinite(results[0][0]).all()
